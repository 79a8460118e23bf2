"""Experts on the stages of a pipeline: what one process makes of the same micro-batches, with the
losses of the gates of all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_lab import WIDTH, Block
from pipeline_lab import SCHEDULES
from small import STAGES, caught, digest, furthest, settings
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.moe import MoE, auxiliary_loss, moe_layers, read_statistics
from zeroexp.moe.statistics import numbers
from zeroexp.pipe_engine import PipeEngine

LONG = pytest.mark.full
FP64 = torch.float64
EXACT = {torch.float32: 1e-6, FP64: 1e-12}
MICRO = 4


@dataclass(frozen=True)
class Case:
    """``degree`` ranks share the experts; the last stage has some of its own, or not."""

    schedule: str = "1f1b"
    stage: int = 1
    degree: int = 1
    expert: str = "mlp"
    dtype: torch.dtype = FP64
    recompute: bool = False
    bare_end: bool = False
    steps: int = 3
    tied: bool = False
    moe: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def model(self, degree: int | None = None) -> nn.Module:
        torch.manual_seed(0)
        more = {"balance_loss": 0.3, "z_loss": 0.01, **self.moe}
        shares = self.degree if degree is None else degree
        blocks = [Block(shares, self.expert, more) for _ in range(2 if self.bare_end else 4)]
        if self.tied:  # one block, used on both stages
            blocks[2:] = blocks[:2]
        ends = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] if self.bare_end else []
        return nn.Sequential(nn.Linear(6, WIDTH), *blocks, *ends, nn.Linear(WIDTH, 3)).to(
            self.dtype
        )

    def batch(self, step: int, data_ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Every micro-batch, those of data rank 0 first."""
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(MICRO * data_ranks, 5, 6, generator=draw, dtype=FP64).to(self.dtype)
        y = torch.randn(MICRO * data_ranks, 5, 3, generator=draw, dtype=FP64).to(self.dtype)
        return list(zip(x, y, strict=True))


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Each gate's loss with a weight of its own, to see that it reaches its stage."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        gates = moe_layers(model).values()
        return F.mse_loss(output, target) + sum(
            weight * auxiliary_loss(gate) for weight, gate in enumerate(gates, 1)
        )

    return loss


def trained(case: Case, data_ranks: int) -> dict[str, Any]:
    model = case.model()
    config = {
        **settings(case.stage, timeout=20, **case.keys),
        "pipeline": {
            "schedule": case.schedule,
            "stages": 2,
            "micro_batches": MICRO,
            "virtual": SCHEDULES[case.schedule],
            "cut": "layers",
        },
    }
    engine = PipeEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config,
        loss=loss_of(model),
        recompute=case.recompute,
    )
    here = dist.get_rank() % data_ranks
    losses = []
    for step in range(case.steps):
        own = case.batch(step, data_ranks)[here * MICRO : (here + 1) * MICRO]
        losses.append(engine.train_micro_batches([x for x, _ in own], [y for _, y in own]))
        engine.step()
    use = read_statistics(model, engine.world.control, engine.world.pipe)
    x, y = case.batch(99, data_ranks)[here]
    found = {
        "losses": losses,
        "numbers": use,
        "state": engine.state_dict(),
        "norm": engine.grad_norm,
        "bytes": engine.ledger.state_bytes(),
        "evaluated": engine.evaluate(x[None], y[None]).loss,
        "left": [len(layer._untaken) for layer in moe_layers(model).values()],
    }
    engine.close()
    return found


def attempt(cases: Sequence[Case], data_ranks: int) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        found: dict[str, Any] = {}
        name, text = caught(lambda c, out: out.update(trained(c, data_ranks)), case, found)
        results.append({**found, "error": f"{name}: {text}" if name else ""})
    return results


def plain(case: Case, data_ranks: int) -> dict[str, Any]:
    """One process with all experts."""
    model = case.model(1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), loss_of(model)
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        batch = case.batch(step, data_ranks)
        losses.append(0.0)
        for x, y in batch:
            one = loss(model(x), y) / len(batch)
            one.backward()
            losses[-1] += float(one.detach())
        optimizer.step()
        for layer in moe_layers(model).values():
            if (bias := layer.gate.bias) is not None and bias.load is not None:
                bias.update(bias.load)
    use = read_statistics(model)
    with torch.no_grad():
        evaluated = [float(loss(model(x), y)) for x, y in case.batch(99, data_ranks)[:data_ranks]]
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "numbers": use, "state": state, "evaluated": evaluated}


def check(cases: Sequence[Case], ranks: Any, num_ranks: int) -> None:
    data_ranks = num_ranks // 2
    results = ranks(num_ranks)(attempt, list(cases), data_ranks, timeout=200)
    for number, case in enumerate(cases):
        found = [each[number] for each in results]
        assert [each["error"] for each in found] == [""] * num_ranks, case
        wanted, limit = plain(case, data_ranks), EXACT[case.dtype]
        assert list(found[0]["state"]) == list(wanted["state"]), case
        assert furthest(found[0]["state"], wanted["state"]) <= limit, case
        by_rank = zip(*(each["losses"] for each in found[:data_ranks]), strict=True)
        mean = [sum(each) / data_ranks for each in by_rank]
        assert mean == pytest.approx(wanted["losses"], rel=limit), case
        for at, each in enumerate(found):
            assert each["losses"] == found[at % data_ranks]["losses"], case  # on the whole pipe
            assert each["norm"] == found[0]["norm"], case
            close = pytest.approx(wanted["evaluated"][at % data_ranks], rel=limit)
            assert each["evaluated"] == close, case
            assert set(each["left"]) == {0}, case
            assert list(each["numbers"]) == list(wanted["numbers"]), case
            for mine, theirs in zip(
                each["numbers"].values(), wanted["numbers"].values(), strict=True
            ):
                assert mine.tokens_per_expert == theirs.tokens_per_expert, case
                assert mine.drop_rate == pytest.approx(theirs.drop_rate, abs=1e-9), case
                assert mine.losses == pytest.approx(dict(theirs.losses), rel=1e-6), case


CASES = [
    Case(degree=2),
    Case(schedule="zb_v", stage=3, bare_end=True),
    Case(schedule="interleaved", stage=2, degree=2, moe={"bias_rate": 0.1, "top_k": 1}),
    Case(schedule="zb_h1", stage=3, degree=2, expert="modules", bare_end=True),
    Case(schedule="gpipe", stage=0, recompute=True, moe={"bias_rate": 0.1, "gate": "topk"}),
    Case(schedule="1f1b", stage=3, degree=2, recompute=True, moe={"capacity_factor": 0.5}),
    Case(stage=3, degree=2, keys={"offload_kind": "cpu_params"}),
    Case(schedule="zb_v", stage=1, degree=2, tied=True, moe={"bias_rate": 0.1, "top_k": 1}),
]


def test_experts_in_a_pipe_train_what_one_process_trains(ranks: Any) -> None:
    check(CASES, ranks, 4)


def test_stages_without_experts_and_one_data_rank(ranks: Any) -> None:
    check([Case(bare_end=True), Case(schedule="zb_v", stage=3)], ranks, 2)


@LONG
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_stage_and_degree(ranks: Any, schedule: str) -> None:
    cases = [
        Case(schedule, stage, degree, expert, recompute=recompute)
        for stage in STAGES
        for degree in (1, 2)
        for expert in ("mlp", "modules")
        for recompute in (False, True)
    ]
    check(cases, ranks, 4)


def test_stages_give_the_same_bits_and_clipping_spans_pipe_and_experts(ranks: Any) -> None:
    cases = [
        Case("zb_h1", stage, 2, dtype=torch.float32, keys={"clip": 0.05, "zero_reduce": "each"})
        for stage in STAGES
    ]
    found = ranks(4)(attempt, cases, 2)
    assert [each["error"] for each in found[0]] == [""] * 4
    bits = [(digest(each["state"]), each["norm"], each["losses"]) for each in found[0]]
    assert bits[0][1] > 0.05 and all(other == bits[0] for other in bits[1:])
    # One process with the same clipping
    case = cases[0]
    model = case.model(1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), loss_of(model)
    for step in range(case.steps):
        optimizer.zero_grad()
        batch = case.batch(step, 2)
        for x, y in batch:
            (loss(model(x), y) / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert furthest(found[0][0]["state"], model.state_dict()) <= 1e-6


def handed_on() -> dict[str, Tensor]:
    """Train in a pipe, load that into an engine without one, and the other way round."""
    case = Case(degree=2, stage=3)
    model = case.model()
    config = {
        **settings(3, timeout=20),
        "pipeline": {"schedule": "1f1b", "stages": 2, "micro_batches": MICRO},
    }
    first = torch.optim.AdamW(model.parameters())
    piped = PipeEngine(model, first, config, loss=loss_of(model))
    x, y = (torch.stack(each) for each in zip(*case.batch(0, 1), strict=True))
    piped.train_batch(x, y)
    piped.step()
    saved, moments = piped.state_dict(), piped.optimizer_state_dict(first)
    piped.close()
    other = case.model(4)
    fixed = {**settings(1, timeout=20), "trainer": {"devices": 4, "gradient_clip_val": None}}
    second = torch.optim.AdamW(other.parameters())
    engine = Engine(other, second, Config.from_mapping(fixed))
    engine.load_state_dict(saved)
    engine.load_optimizer_state_dict(second, moments)
    again, states = engine.state_dict(), engine.optimizer_state_dict(second)
    engine.close()
    if dist.get_rank():
        return {}
    assert list(again) == list(saved)
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert digest(_tensors(states)) == digest(_tensors(moments))
    return saved


def _tensors(states: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": value
        for number, each in states["state"].items()
        for name, value in each.items()
        if isinstance(value, Tensor)
    }


def test_a_checkpoint_of_a_pipe_goes_to_any_degree_without_one(ranks: Any) -> None:
    saved = ranks(4)(handed_on)[0]
    assert saved["1.moe.experts.down"].shape[0] == 4  # all of them, in the order of their ids


def forgotten() -> tuple[str, str]:
    case = Case(bare_end=True)
    model = case.model()
    config = {
        **settings(1, timeout=20),
        "pipeline": {"schedule": "1f1b", "stages": 2, "micro_batches": MICRO},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PipeEngine(model, optimizer, config, loss=F.mse_loss)
    x, y = (torch.stack(each) for each in zip(*case.batch(0, 1), strict=True))
    try:
        return caught(lambda: [engine.train_batch(x, y) for _ in range(20)])
    finally:
        engine.close(collective=False)


def test_a_loss_that_forgets_the_gates_is_told(ranks: Any) -> None:
    for name, text in ranks(2)(forgotten):
        assert name == "StageError" and "auxiliary_loss(model)" in text


FAILING = Case(bare_end=True, steps=2, moe={"bias_rate": 0.1, "top_k": 1})


def after_a_failure() -> dict[str, Tensor]:
    case = FAILING
    model = case.model()
    config = {
        **settings(1, timeout=20),
        "pipeline": {"schedule": "1f1b", "stages": 2, "micro_batches": MICRO},
    }
    fails = [False, False, True]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and fails.pop(0):
            raise ValueError("before it takes the gates' losses")
        return loss_of(model)(output, target)

    engine = PipeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), config, loss=loss)
    for step in (7, 0, 1):
        x, y = (torch.stack(each) for each in zip(*case.batch(step, 1), strict=True))
        name, _ = caught(engine.train_batch, x, y)
        assert name == ("StageError" if step == 7 else "")
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


def test_losses_of_a_batch_that_failed_are_forgotten(ranks: Any) -> None:
    found = ranks(2)(after_a_failure)[0]
    assert furthest(found, plain(FAILING, 1)["state"]) <= 1e-12


def uneven_evaluation(sizes: list[int]) -> Any:
    """An evaluation of another number of samples on each data rank, and a failure on one."""
    case = Case(degree=2)
    model = case.model()
    config = {
        **settings(1, timeout=6),
        "pipeline": {"schedule": "1f1b", "stages": 2, "micro_batches": MICRO},
    }
    fails = [False]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("here alone")
        return F.mse_loss(output, target) + auxiliary_loss(model)

    engine = PipeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), config, loss=loss)
    here = dist.get_rank() % 2
    x, y = (torch.stack(each) for each in zip(*case.batch(0, 4), strict=True))
    x, y = x[: sizes[here]], y[: sizes[here]]
    found = engine.evaluate(x, y).loss
    fails[0] = here == 1
    first = caught(engine.evaluate, x, y)
    again = caught(engine.evaluate, x, y)
    engine.close(collective=False)
    return found, first, again


def test_data_ranks_that_share_experts_evaluate_together(ranks: Any) -> None:
    sizes = [8, 6]
    case = Case()
    model = case.model(1)
    x, y = (torch.stack(each) for each in zip(*case.batch(0, 4), strict=True))
    for at, (found, first, again) in enumerate(ranks(4)(uneven_evaluation, sizes)):
        n = sizes[at % 2]
        with torch.no_grad():
            assert found == pytest.approx(float(F.mse_loss(model(x[:n]), y[:n])), rel=1e-12)
        # The pipe whose loss raised says so; the other one waited for it in vain.
        assert first[0] == ("StageError" if at % 2 else "CollectiveTimeout"), first
        assert again[0] == "ModelError" and "Build a new engine" in again[1], again


def refused(recompute: bool) -> tuple[str, str]:
    if recompute:
        noise = torch.Generator().manual_seed(0)
        case = Case(moe={"jitter": 0.1, "generator": noise}, recompute=True)
        schedule = "1f1b"
    else:
        case, schedule = Case(degree=2), "auto"
    model = case.model()
    config = {**settings(1, timeout=20), "pipeline": {"schedule": schedule, "stages": 2}}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = torch.zeros(1, 5, 6, dtype=FP64)
    more: dict[str, Any] = {"sample": sample, "recompute": case.recompute, "loss": F.mse_loss}
    return caught(lambda: PipeEngine(model, sgd, config, **more))


def test_what_a_stage_cannot_do_alone_is_refused(ranks: Any) -> None:
    for name, text in ranks(4)(refused, False):
        assert name == "ModelError" and "name a schedule" in text
    for name, text in ranks(2)(refused, True):
        assert name == "ModelError" and "generators of their own" in text


def test_a_rank_alone_counts_for_the_mean_of_seconds() -> None:
    layer = MoE(4, nn.Linear(4, 4), 2)
    layer(torch.zeros(3, 4))
    elsewhere = MoE(4, nn.Linear(4, 4), 2)
    layer.statistics.transferred(8, 0.5)
    sums = layer.statistics.sums() + elsewhere.statistics.sums()
    assert numbers(sums).all_to_all_seconds == 0.5
