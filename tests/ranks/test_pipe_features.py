"""What an engine does beside plain training, with its module spread over a pipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipe_zero_lab import Case, Found, reference, train_all
from pipeline_lab import tall_mlp
from small import STAGES, caught, digest, furthest, rank, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp import gathered
from zeroexp.config.sections import ModelConfig
from zeroexp.engine import Engine
from zeroexp.models.gpt import GPT
from zeroexp.models.loss import next_token_loss
from zeroexp.pipe_engine import PipeEngine

FP32, FP64 = torch.float32, torch.float64


def bits(found: list[Found]) -> list[Any]:
    return [digest(found[0].state), found[0].losses]


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_zero_stages_are_bit_identical_in_a_pipe(ranks, name):
    cases = [Case(name, stage, FP32, "adamw") for stage in STAGES]
    results = ranks(4)(train_all, cases)
    found = [bits([each[n] for each in results]) for n in range(len(cases))]
    assert all(each == found[0] for each in found[1:])


KINDS: list[dict[str, Any]] = [
    {"offload_optim": "cpu"},
    {"offload_optim": "nvme", "offload_params": "nvme"},
    {"offload_optim": "cpu", "offload_params": "cpu", "offload_fraction": 0.5},
    {"clip": 0.05},
    {"accumulate": 2},
    {"zero_shard_size": 1},
    {"zero_reduce": "last"},
    {"zero_overlap": False, "zero_bucket": 64},
]


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_options_mean_what_they_mean_without_a_pipe(ranks, keys, tmp_path):
    """fp64 to 1e-10 of one process; where state lies changes no bit."""
    if "nvme" in keys.values():
        keys = {**keys, "nvme_dir": str(tmp_path)}
    case = Case("interleaved", 3, FP64, "adamw", keys=keys, steps=3)
    cases = [case, replace(case, stage=1), replace(case, stage=2)]
    if "offload_params" in keys or "zero_shard_size" in keys:
        cases = [case]
    plain = replace(case, keys={})
    results = ranks(4)(train_all, [*cases, plain])
    losses, weights = reference(case, 2)
    for number in range(len(cases)):
        found = [each[number] for each in results]
        assert furthest(found[0].state, weights) <= 1e-10
        mean = [(a + b) / 2 for a, b in zip(found[0].losses, found[1].losses, strict=True)]
        assert mean == pytest.approx(losses, abs=1e-10)
        if "offload_optim" in keys:
            assert bits(found) == bits([each[-1] for each in results])
        assert len({tuple(f.norms) for f in found}) == 1  # one norm over all stages


# -- tied weights ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab_size": 17, "dim": 8, "layers": 3, "heads": 2, "max_seq_len": 6}


def gpt(*, frozen: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SIZES)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.embedding.weight.requires_grad_(not frozen)
    return model


def token_batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randint(0, 17, (4, 8, 7), generator=torch.Generator().manual_seed(1))
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def gpt_in_a_pipe(
    name: str, stage: int, frozen: bool, clip: float | None
) -> tuple[dict[str, Tensor], list[float | None]]:
    model = gpt(frozen=frozen)
    virtual = {"interleaved": 2, "zb_v": 2}.get(name, 1)
    config = {
        **settings(stage, clip=clip),
        "pipeline": {"schedule": name, "stages": 2, "micro_batches": 2, "virtual": virtual},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = PipeEngine(model, optimizer, config, loss=next_token_loss)
    norms = []
    for batch in token_batches():
        engine.train_batch(*(t.chunk(2)[rank() % 2] for t in batch))
        engine.step()
        norms.append(engine.grad_norm)
    engine.close()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("name", "stage", "frozen", "clip"),
    [("1f1b", 3, False, 0.1), ("1f1b", 0, False, None), ("interleaved", 2, True, None),
     ("zb_v", 3, False, 0.1), ("zb_h1", 1, False, 0.1)],
)  # fmt: skip
def test_a_tied_embedding_gets_one_gradient(ranks, name, stage, frozen, clip):
    """PP-07, PP-08, with the norm over all stages counting the tied weight once."""
    model = gpt(frozen=frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = []
    for x, y in token_batches():
        optimizer.zero_grad()
        next_token_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        wanted.append(float(norm))
        optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for theirs, norms in ranks(4)(gpt_in_a_pipe, name, stage, frozen, clip):
        assert furthest(theirs, weights) <= 1e-10
        assert norms == pytest.approx(wanted, rel=1e-10)


# -- checkpoints -----------------------------------------------------------------------------------


def half(case: Case, path: str, *, first: bool, piped: bool) -> dict[str, Tensor]:
    """Two of four steps, saved; or loaded and two more, in a pipe or not."""
    torch.manual_seed(0 if first else 99)
    model = tall_mlp(FP64, blocks=4)
    if not first:
        for p in model.parameters():
            nn.init.normal_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine: Any
    if piped:
        engine = PipeEngine(model, optimizer, case.config(), loss=F.mse_loss)
    else:
        engine = Engine(model, optimizer, settings(case.stage))
    if not first:
        engine.load_checkpoint(path)
    parts = 2 if piped else 4
    for x, y in case.batches(2)[:2] if first else case.batches(2)[2:4]:
        mine = [t.chunk(parts)[rank() % parts] for t in (x, y)]
        if piped:
            engine.train_batch(*mine)
        else:
            engine.backward(F.mse_loss(engine(mine[0]), mine[1]))
        engine.step()
    if first:
        engine.save_checkpoint(path)
    engine.close()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)], ids=str)
def test_checkpoints_go_from_pipe_to_none_and_back(ranks, ways, tmp_path: Path):
    case, other = Case("zb_v", 3, FP64, "adamw"), Case("1f1b", 1, FP64, "adamw")
    ranks(4)(half, case, str(tmp_path / "c"), first=True, piped=ways[0])
    found = ranks(4)(half, other, str(tmp_path / "c"), first=False, piped=ways[1])
    _, weights = reference(replace(case, steps=5), 2)
    model = tall_mlp(FP64, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in case.batches(2)[:4]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for theirs in found:
        assert furthest(theirs, weights) <= 1e-10


# -- what goes wrong -------------------------------------------------------------------------------


class Explodes(nn.Module):
    """Its output is infinite where its flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (float("inf") if self.now else 1.0)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            raise ValueError("broken layer")
        return x * self.weight


def build(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 6), nn.Linear(6, 6, bias=False))


def config(stage: int, **keys: Any) -> dict[str, Any]:
    pipeline = {"schedule": "1f1b", "stages": 2, "micro_batches": 2, "cut": "layers"}
    return {**settings(stage, timeout=20, **keys), "pipeline": pipeline}


def skipping(stage: int) -> tuple[list[Any], dict[str, Tensor]]:
    """fp16: the second of three steps overflows in the first stage of one data rank only."""
    broken = Explodes()
    model = build(broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PipeEngine(
        model,
        optimizer,
        config(stage, compute="fp16", scale_init=256.0, scale_hysteresis=1),
        loss=loss_of_floats,
    )
    facts = []
    for number in range(3):
        broken.now = number == 1 and rank() == 1
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        engine.train_batch(x, x)
        applied = engine.step()
        facts.append((applied, engine.loss_scale, engine.skipped_steps))
    engine.close()
    return facts, {n: p.detach() for n, p in model.named_parameters()}


def loss_of_floats(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_in_one_stage_skips_the_step_of_all(ranks, stage):
    for facts, theirs in (results := ranks(4)(skipping, stage)):
        assert [applied for applied, *_ in facts] == [True, False, True]
        assert [skipped for *_, skipped in facts] == [0, 1, 1]
        assert facts[1][1] == 128.0
        assert furthest(theirs, results[0][1]) == 0


def stopping() -> tuple[str, str]:
    broken = Explodes()
    model = build(broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PipeEngine(model, optimizer, config(2), loss=F.mse_loss)
    broken.now = rank() == 0
    engine.train_batch(torch.ones(4, 6), torch.ones(4, 6))
    return caught(engine.step)


def test_every_stage_names_the_parameter_that_is_not_finite(ranks):
    for name, text in ranks(4)(stopping):
        assert name == "NonFiniteError"
        assert "the gradient of 0.weight" in text and "found by rank 0" in text
        assert "loss was not finite on rank 2" in text  # the last stage of rank 0's pipe


def failing(stage: int) -> tuple[tuple[str, str], float, dict[str, Tensor]]:
    """A stage raises in one pipe; the other one is told to raise too, and training goes on."""
    broken = Raises()
    model = build(broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PipeEngine(model, optimizer, config(stage), loss=F.mse_loss)
    broken.now = True
    x = torch.ones(4, 6)
    told = caught(engine.train_batch, x, x)
    broken.now = False
    loss = engine.train_batch(x, x)
    engine.step()
    engine.close()
    return told, loss, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_stage_that_raises_ends_the_run_on_all_its_ranks(ranks, stage):
    model = build(Raises())
    x = torch.ones(4, 6)
    loss = F.mse_loss(model(x), x)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for place, (told, value, theirs) in enumerate(ranks(4)(failing, stage)):
        assert told[0] == "StageError"
        assert f"rank {place % 2}, F0.0, stage 0: ValueError: broken layer" in told[1]
        assert value == pytest.approx(float(loss.detach()), abs=1e-6)
        assert furthest(theirs, weights) <= 1e-6


def evaluating(stage: int) -> tuple[list[float | None], int, list[tuple[str, str]]]:
    """PP-02: training, evaluation of other sizes between; then what is refused."""
    model = tall_mlp(FP64, blocks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    case = Case("zb_v", stage, FP64, steps=3)
    engine = PipeEngine(model, optimizer, case.config(), loss=F.mse_loss)
    losses: list[float | None] = []
    mine = [[t.chunk(2)[rank() % 2] for t in batch] for batch in case.batches(2)]
    losses.append(engine.train_batch(*mine[0]))
    losses.append(engine.evaluate(*(t[:3] for t in mine[1])).loss)
    engine.step()
    losses.append(engine.evaluate(*mine[1]).loss)
    rows = sum(len(out) for out in engine.evaluate(mine[2][0]).outputs or ())
    missing = next(iter(engine.model.elsewhere), None)
    refused = [caught(engine, mine[0][0]), caught(model.state_dict)]
    if missing is not None:
        lost = dict(model.named_parameters())[missing]
        refused.append(caught(gathered(lost).__enter__))
    return losses, rows, refused


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_between_and_what_is_refused(ranks, stage):
    case = Case("zb_v", stage, FP64, steps=3)
    model = tall_mlp(FP64, blocks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = case.batches(2)
    halves = [[t.chunk(2) for t in batch] for batch in batches]
    with torch.no_grad():
        before = [float(F.mse_loss(model(x[:3]), y[:3])) for x, y in zip(*halves[1], strict=True)]
    F.mse_loss(model(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    with torch.no_grad():
        after = [float(F.mse_loss(model(x), y)) for x, y in zip(*halves[1], strict=True)]
    for place, (losses, rows, refused) in enumerate(ranks(4)(evaluating, stage)):
        assert losses[1:] == pytest.approx([before[place % 2], after[place % 2]], abs=1e-12)
        assert rows == (8 if place < 2 else 0)  # a V's first rank holds the last stage
        assert {name for name, _ in refused} == {"ModelError"}
        assert "train_batch" in refused[0][1]
        assert all("another stage" in text for _, text in refused[1:])


# -- steps of another kind -------------------------------------------------------------------------


def step_by_step(case: Case, limit: float | None) -> dict[str, Tensor]:
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = PipeEngine(model, optimizer, case.config(), loss=case.loss)
    for x, y in case.batches(world() // 2):
        engine.train_batch(*(t.chunk(world() // 2)[rank() % (world() // 2)] for t in (x, y)))
        if limit is not None:
            engine.clip_value(limit)
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


def in_one_process(case: Case, data_ranks: int, limit: float | None, late: int) -> Any:
    """``late``: steps by which a gradient waits for its own."""
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    waiting: list[list[Tensor]] = []
    for x, y in case.batches(data_ranks):
        grads = torch.autograd.grad(case.loss(model(x), y), list(model.parameters()))
        waiting.append([g if limit is None else g.clamp(-limit, limit) for g in grads])
        if len(waiting) > late:
            apply(model, optimizer, waiting.pop(0))
    for grads in waiting:
        apply(model, optimizer, grads)
    return model.state_dict()


def apply(model: torch.nn.Module, optimizer: torch.optim.Optimizer, grads: list[Tensor]) -> None:
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    optimizer.step()


DELAYED = {"offload_kind": "cpu", "offload_delayed_update": True}


@pytest.mark.parametrize(("name", "stage"), [("1f1b", 1), ("zb_v", 3)])
@pytest.mark.parametrize(("keys", "limit"), [({}, 0.002), (DELAYED, None)], ids=["clip", "late"])
def test_values_are_clipped_and_updates_are_late(ranks, name, stage, keys, limit):
    case = Case(name, stage, FP64, "adamw", keys=keys)
    wanted = in_one_process(case, 2, limit, late=int(bool(keys)))
    assert furthest(in_one_process(case, 2, None, late=0), wanted) > 1e-4
    assert furthest(ranks(4)(step_by_step, case, limit)[0], wanted) <= 1e-10
