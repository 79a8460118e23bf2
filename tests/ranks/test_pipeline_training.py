"""Every schedule trains as one process does on the same global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_lab import (
    SCHEDULES,
    Pipe,
    gather_weights,
    plain_losses,
    random_schedule,
    regression_batches,
    scheduled,
    tall_mlp,
)
from small import furthest, rank
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.runtime import split_batch
from zeroexp.pipeline.simulate import simulate

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LIMIT = {"fp32": 1e-6, "fp64": 1e-12}
LR = 0.05


def trained(
    cases: list[tuple[str, str]], ranks: int, micro_batches: int, recompute: bool
) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for name, dtype in cases:
        model = tall_mlp(DTYPES[dtype], blocks=ranks * 2)
        pipe = Pipe(model, scheduled(name, ranks, micro_batches), recompute=recompute)
        batches = regression_batches(5, micro_batches * 2, DTYPES[dtype])
        found.append((pipe.train(batches, LR), pipe.weights()))
        pipe.channel.close()
    return found


def compare(
    results: list[Any], cases: list[tuple[str, str]], ranks: int, micro_batches: int
) -> None:
    for number, (name, dtype) in enumerate(cases):
        batches = regression_batches(5, micro_batches * 2, DTYPES[dtype])
        model = tall_mlp(DTYPES[dtype], blocks=ranks * 2)
        losses, weights = plain_losses(model, batches, F.mse_loss, LR)
        found = [each[number] for each in results]
        assert furthest(gather_weights([w for _, w in found]), weights) <= LIMIT[dtype], name
        for theirs, _ in found:
            assert theirs == found[0][0], name
            assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) <= LIMIT[dtype]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_on_two_ranks(ranks, recompute):
    cases = [(name, dtype) for name in SCHEDULES for dtype in DTYPES]
    compare(ranks(2)(trained, cases, 2, 4, recompute), cases, 2, 4)


def test_schedules_on_four_ranks(ranks):
    cases = [("1f1b", "fp64"), ("zb_v", "fp64"), ("interleaved", "fp64"), ("zb_v", "fp32")]
    compare(ranks(4)(trained, cases, 4, 8, False), cases, 4, 8)


@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [4, 12])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_on_four_ranks(ranks, recompute, micro_batches):
    cases = [(name, dtype) for name in SCHEDULES for dtype in DTYPES]
    found = ranks(4)(trained, cases, 4, micro_batches, recompute, timeout=240)
    compare(found, cases, 4, micro_batches)


def random_training(
    seeds: list[int], num_ranks: int
) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for seed in seeds:
        schedule = random_schedule(seed, num_ranks)
        layers = [nn.Sequential(nn.ELU(), nn.Linear(6, 6)) for _ in range(schedule.num_stages)]
        pipe = Pipe(seeded(layers), schedule, recompute=seed % 3 == 0)
        batches = square_batches(schedule.micro_batches)
        found.append((pipe.train(batches, LR), pipe.weights()))
        pipe.channel.close()
    return found


def seeded(layers: list[nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(10)
    for layer in layers:
        layer[1].reset_parameters()
    return nn.Sequential(*layers).double()


def square_batches(micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(11)
    drawn = torch.randn(3, 2, micro_batches * 2, 6, generator=source, dtype=torch.float64)
    return [(x, y) for x, y in drawn]


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 16), (3, 8), (4, 8)])
def test_random_valid_lists_run(ranks, num_ranks, count):
    seeds = list(range(count))
    results = ranks(num_ranks)(random_training, seeds, num_ranks)
    for seed in seeds:
        schedule = random_schedule(seed, num_ranks)
        layers = [nn.Sequential(nn.ELU(), nn.Linear(6, 6)) for _ in range(schedule.num_stages)]
        batches = square_batches(schedule.micro_batches)
        losses, weights = plain_losses(seeded(layers), batches, F.mse_loss, LR)
        found = [each[seed] for each in results]
        assert furthest(gather_weights([w for _, w in found]), weights) <= 1e-12, schedule
        for theirs, _ in found:
            assert theirs == pytest.approx(losses, abs=1e-12)


class Counted(nn.Module):
    """A linear layer; how many of its micro-batches hold something for backward is counted at the
    tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(6, 6)
        self.live = self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        held = Held(self)

        def keep(tensor: Tensor) -> tuple[Tensor, Held]:
            return tensor.detach(), held  # not itself: a saved output would hold its own node

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept[0]):
            return torch.tanh(self.linear(x))


class Held:
    """Lives as long as what a forward saved."""

    def __init__(self, counter: Counted) -> None:
        self.counter = counter
        counter.live += 1
        counter.peak = max(counter.peak, counter.live)

    def __del__(self) -> None:
        self.counter.live -= 1


def counted(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    schedule = scheduled(name, ranks, micro_batches)
    layers = [Counted() for _ in range(schedule.num_stages)]
    calls = {"hook": 0, "after": 0}
    weight = None
    for stage in schedule.stages_of(rank()):
        weight = layers[stage].linear.weight
        weight.register_hook(lambda g: calls.__setitem__("hook", calls["hook"] + 1))
        weight.register_post_accumulate_grad_hook(
            lambda p: calls.__setitem__("after", calls["after"] + 1)
        )
    pipe = Pipe(nn.Sequential(*layers), schedule)
    before = pipe.ledger.comm_bytes()
    x = torch.randn(micro_batches * 3, 6)
    pipe.run(x, x)
    first = dict(pipe.ledger.comm_bytes())
    pipe.run(x, x)
    held = schedule.stages_of(rank())
    stages = pipe.split.stages
    return {
        "calls": calls,
        "live": [layers[s].live for s in held],
        "peak": [layers[s].peak for s in held],
        "in_flight": [stage.peak_in_flight for stage in stages],
        "sent": first.get("send", 0) - before.get("send", 0),
        "sent_again": pipe.ledger.comm_bytes()["send"] - first["send"],
        "control_again": pipe.ledger.comm_bytes()["control"] - first["control"],
    }


@pytest.mark.parametrize(
    ("name", "num_ranks", "micro_batches"),
    [(name, 2, 6) for name in SCHEDULES] + [("1f1b", 4, 8), ("zb_v", 4, 8)],
)
def test_hooks_fire_once_and_memory_is_the_simulated(ranks, name, num_ranks, micro_batches):
    """PP-05; in flight at rank r of 1F1B: min(m, p - r); bytes: each boundary between ranks carries
    3 x 6 fp32 per micro-batch and way."""
    found = ranks(num_ranks)(counted, name, num_ranks, micro_batches)
    schedule = scheduled(name, num_ranks, micro_batches)
    peaks = simulate(schedule, Costs.uniform(schedule.num_stages)).peak_in_flight
    homes = schedule.rank_of
    for r, each in enumerate(found):
        held = len(schedule.stages_of(r))
        assert each["calls"] == dict.fromkeys(("hook", "after"), 2 * held * micro_batches)
        assert each["live"] == [0] * held
        # The output's tanh is saved by the graph alone: what lives is what is in flight.
        assert each["peak"] == each["in_flight"]
        assert max(each["peak"]) <= peaks[r] <= sum(each["peak"])
        if name == "1f1b":
            assert each["peak"] == [min(micro_batches, num_ranks - r)]
        after = [s for s in range(len(homes) - 1) if homes[s] == r and homes[s + 1] != r]
        behind = [s for s in range(1, len(homes)) if homes[s] == r and homes[s - 1] != r]
        messages = (len(after) + len(behind)) * micro_batches
        assert each["sent"] == each["sent_again"] == messages * 3 * 6 * 4
        # A prefix of 64 bytes and what fills up the tensor's 72 x 4 to a multiple of it; at the
        # run's end three numbers to each other rank.
        assert each["control_again"] == messages * (64 + (-72 % 64)) + (num_ranks - 1) * 24


def dropped(name: str, recompute: bool) -> list[Tensor]:
    torch.manual_seed(8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)))
    pipe = Pipe(model, scheduled(name, 2, 4), recompute=recompute)
    torch.manual_seed(9 + rank())
    x = torch.ones(8, 6)
    pipe.run(x, x)
    return [p.grad.clone() for p in pipe.parameters.values()] + [torch.rand(2)]


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_dropout_is_the_same_again_and_with_recompute(ranks, name):
    first, again, recomputed = (ranks(2)(dropped, name, how) for how in (False, False, True))
    for a, b, c in zip(first, again, recomputed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert all(torch.allclose(x, y, atol=1e-7) for x, y in zip(a, c, strict=True))


def two_pipes(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Ranks 0 and 1 hold the first half of the model for two halves of the batch, 2 and 3 the
    second: the caller's data-parallel groups are (0, 1) and (2, 3)."""
    data = rank() % 2
    pipe = Pipe(tall_mlp(), scheduled(name, 2, 2), members=[data, data + 2])
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    optimizer = torch.optim.SGD(pipe.parameters.values(), lr=LR)
    losses = []
    for x, y in regression_batches(3, 8):
        losses.append(pipe.run(x.chunk(2)[data], y.chunk(2)[data]).loss or 0.0)
        for parameter in pipe.parameters.values():
            dist.all_reduce(parameter.grad, group=groups[rank() // 2])
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return losses, pipe.weights()


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_two_pipes_side_by_side(ranks, name):
    losses, weights = plain_losses(tall_mlp(), regression_batches(3, 8), F.mse_loss, LR)
    found = ranks(4)(two_pipes, name)
    assert furthest(gather_weights([w for _, w in found]), weights) <= 1e-12
    assert found[0][0] == found[2][0] and found[1][0] == found[3][0]
    for a, b, whole in zip(found[0][0], found[1][0], losses, strict=True):
        assert (a + b) / 2 == pytest.approx(whole, abs=1e-12)


def weighted(name: str) -> tuple[float | None, dict[str, Tensor], float | None]:
    pipe = Pipe(tall_mlp(), scheduled(name, 2, 3))
    x, y = regression_batches(1, 8)[0]
    cuts = [slice(0, 3), slice(3, 6), slice(6, 8)]
    result = pipe.executor.run(
        [x[c] for c in cuts], [y[c] for c in cuts], weights=[3, 3, 2], scale=4.0
    )
    grads = {n: p.grad.clone() / 4 for n, p in pipe.parameters.items() if p.grad is not None}
    other = pipe.executor.evaluate([x, x[:5]], [y, y[:5]], micro_batches=2, weights=[8, 5])
    return result.loss, grads, other.loss


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_micro_batches_of_different_sizes_weigh_what_they_hold(ranks, name):
    """PP-10: 3, 3 and 2 of 8 samples give the loss and gradients of the whole batch's mean, and an
    evaluation of other sizes between (PP-02) gives its own."""
    model = tall_mlp()
    x, y = regression_batches(1, 8)[0]
    loss = F.mse_loss(model(x), y)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    both = float((8 * loss + 5 * F.mse_loss(model(x[:5]), y[:5])).detach() / 13)
    found = ranks(2)(weighted, name)
    for mean, _, evaluated in found:
        assert mean == pytest.approx(float(loss.detach()), abs=1e-14)
        assert evaluated == pytest.approx(both, abs=1e-14)
    assert furthest(gather_weights([g for _, g, _ in found]), grads) <= 1e-14


def alternating(name: str) -> tuple[list[float | None], dict[str, Tensor], int]:
    """PP-02: train with 2 samples per micro-batch, evaluate 8, train, evaluate 3."""
    pipe = Pipe(tall_mlp(), scheduled(name, 2, 4))
    batches = regression_batches(4, 8)
    losses: list[float | None] = pipe.train([batches[0]], LR)  # type: ignore[assignment]
    x, y = batches[1]
    losses.append(pipe.executor.evaluate([x], [y], micro_batches=1).loss)
    losses += pipe.train([batches[2]], LR)
    x, y = (t[:3] for t in batches[3])
    result = pipe.executor.evaluate([x], [y], micro_batches=1)
    losses.append(result.loss)
    predicted = pipe.executor.evaluate(split_batch(x, 3), micro_batches=3)
    assert predicted.loss is None
    rows = sum(len(out) for out in predicted.outputs or ())
    return losses, pipe.weights(), rows


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_evaluation_between_steps_changes_nothing(ranks, name):
    batches = regression_batches(4, 8)
    model = tall_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    wanted = []
    for number, size in enumerate((8, 8, 8, 3)):
        x, y = (t[:size] for t in batches[number])
        loss = F.mse_loss(model(x), y)
        wanted.append(float(loss.detach()))
        if number in (0, 2):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = ranks(2)(alternating, name)
    for losses, _, _ in found:
        assert losses == pytest.approx(wanted, abs=1e-12)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    assert furthest(gather_weights([w for _, w, _ in found]), weights) <= 1e-12
    last = scheduled(name, 2, 4).rank_of[-1]
    assert [rows for _, _, rows in found] == [3 if r == last else 0 for r in range(2)]
