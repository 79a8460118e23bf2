"""A pipeline after something went wrong, or is asked for what one stage alone does not know."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pipe_models import FP64, Holds, Trial, linear, mlp, rows, whole
from small import caught, furthest, rank, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp import gathered
from zeroexp.engine import Engine
from zeroexp.pipe_engine import PipeEngine

MLP = Trial("mlp", stage=3, micro_batches=2, keys={"timeout": 25})


class Breaks(nn.Module):
    """Raises what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=FP64))
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x * self.weight


def breaking() -> tuple[nn.Sequential, Breaks]:
    a, b, c, d = linear(6, 8, 8, 8, 4)
    broken = Breaks()
    return nn.Sequential(a, b, c, broken, d), broken


def batches(steps: int, data_ranks: int) -> list[list[Any]]:
    """By step and data rank, whole batches of 4 samples."""
    found = []
    for step in range(steps):
        one = rows(step, data_ranks, samples=4)
        found.append(one)
    return found


def engine_of(model: nn.Module, trial: Trial = MLP, **keys: Any) -> PipeEngine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return PipeEngine(model, optimizer, trial.config(), loss=F.mse_loss, **keys)


def part(batch: list[Any], stages: int = 2) -> Any:
    return batch[rank() % (world() // stages)]


# -- going on --------------------------------------------------------------------------------------


def window_with_failures(stage: int, name: str) -> tuple[list[Any], dict[str, Tensor]]:
    """Two batches a step. A batch that fails drops its window; an evaluation, failed or not, drops
    nothing; a ``step()`` after a failure does nothing."""
    model, broken = breaking()
    trial = Trial("mlp", name, stage, 2, keys={"accumulate": 2, "timeout": 25})
    engine = engine_of(model, trial)
    one, two, three = batches(3, world() // 2)
    facts: list[Any] = [engine.train_batch(*part(one)) and engine.step()]
    broken.error = ValueError("once")
    facts.append(caught(engine.train_batch, *part(two))[0])
    facts.append(engine.step())
    broken.error = None
    facts.append(engine.train_batch(*part(one)) and engine.step())
    engine.evaluate(*part(three))
    broken.error = ValueError("in an evaluation")
    facts.append(caught(engine.evaluate, *part(three))[0])
    broken.error = None
    facts.append(engine.train_batch(*part(two)) and engine.step())
    engine.train_batch(*part(three))
    engine.zero_grad()
    facts.append(engine.train_batch(*part(three), last=False) and engine.step())
    facts.append(engine.train_batch(*part(one)) and engine.step())
    engine.close()
    return facts, whole(model)


@pytest.mark.parametrize(("stage", "name"), [(3, "1f1b"), (1, "zb_h1")])
def test_a_window_with_failures(ranks, stage, name):
    model, _ = breaking()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    one, two, three = batches(3, 2)
    for window in ((one, two), (three, one)):
        optimizer.zero_grad()
        for batch in window:
            (sum(F.mse_loss(model(x), y) for x, y in batch) / 4).backward()
        optimizer.step()
    for facts, found in ranks(4)(window_with_failures, stage, name):
        assert facts == [False, "StageError", False, False, "StageError", True, False, True]
        assert furthest(found, whole(model)) <= 1e-12


class Interrupted(BaseException):
    """As Ctrl-C is: no ``Exception``."""


def interrupted() -> list[tuple[str, str]]:
    model, broken = breaking()
    engine = engine_of(model)
    batch = part(batches(1, world() // 2)[0])
    engine.train_batch(*batch)
    engine.step()
    broken.error = Interrupted("now")
    told = []
    for _ in range(2):
        try:
            engine.train_batch(*batch)
        except BaseException as error:
            told.append((type(error).__name__, str(error)))
    engine.close(collective=False)
    return told


@pytest.mark.full
def test_an_interrupt_ends_the_engine_and_nothing_waits(ranks):
    """The second stage is interrupted; the first one finds it gone after the timeout."""
    found = ranks(2)(interrupted)
    assert found[1][0] == ("Interrupted", "now")
    assert found[0][0][0] in ("CollectiveTimeout", "StageError")
    for told in found:
        assert told[1][0] == "ModelError" and "interrupted" in told[1][1]


# -- what one stage does not know alone ------------------------------------------------------------


def gradients(name: str) -> tuple[dict[str, Tensor | None], tuple[str, str], tuple[str, str]]:
    model = mlp()
    model[2].bias.requires_grad_(False)
    engine = engine_of(model, Trial("mlp", name, 2, 2))
    engine.train_batch(*part(batches(1, world() // 2)[0]))
    found = {n: engine.full_grad(p) for n, p in model.named_parameters()}
    stranger = caught(engine.full_grad, nn.Parameter(torch.ones(1)))
    kept = caught(engine.close, keep_sharded=True)
    engine.close()
    return found, stranger, kept


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_whole_gradient_is_known_on_every_stage(ranks, name):
    model = mlp()
    model[2].bias.requires_grad_(False)
    pair = batches(1, 2)[0]
    (sum(F.mse_loss(model(x), y) for x, y in pair) / 2).backward()
    for found, stranger, kept in ranks(4)(gradients, name):
        for key, param in model.named_parameters():
            if param.grad is None:
                assert found[key] is None
            else:
                assert torch.allclose(found[key].double(), param.grad, atol=1e-6)
        assert stranger[0] == "ModelError" and "does not belong" in stranger[1]
        assert kept[0] == "ModelError" and "keep_sharded" in kept[1]


def ends_alone() -> dict[str, Any]:
    """Three stages: each is given what it needs and no more, and the middle one nothing."""
    model = mlp()
    engine = engine_of(model, Trial("three", "1f1b", 0, 2, keys={"timeout": 25}))
    x, y = batches(1, 1)[0][0]
    mine = (x if rank() == 0 else None, y if rank() == 2 else None)
    found = {"loss": engine.train_batch(*mine), "eval": engine.evaluate(*mine).loss}
    found["odd"] = caught(engine.train_batch, *(None if t is None else t[:3] for t in mine))
    found["none"] = caught(engine.train_batch)
    found["no target"] = caught(engine.train_batch, mine[0])
    found["size"] = engine.evaluate(*(None if t is None else t[:3] for t in mine)).loss
    engine.close()
    return found


def test_each_end_of_the_pipe_needs_its_end_of_the_batch(ranks):
    model = mlp()
    x, y = batches(1, 1)[0][0]
    loss, less = (F.mse_loss(model(x[:n]), y[:n]).item() for n in (4, 3))
    for found in ranks(3)(ends_alone):
        assert found["loss"] == pytest.approx(loss, abs=1e-12)
        assert found["eval"] == pytest.approx(loss, abs=1e-12)
        assert found["size"] == pytest.approx(less, abs=1e-12)
        for case, said in (
            ("odd", "3 samples do not make 2 equal micro-batches"),
            ("none", "needs the micro-batches' "),
            ("no target", "needs the micro-batches' targets"),
        ):
            assert found[case][0] == "StageError" and said in found[case][1], found[case]
            assert "rank " in found[case][1] and "start of the run" in found[case][1]


def unlike(kind: str) -> tuple[str, str]:
    """Rank 1 of 4 builds something else."""
    if kind == "shape":
        model = nn.Sequential(*linear(6, 8, 8, 9 if rank() == 1 else 8, 8, 4))
    else:
        model = mlp()
        if rank() == 1:
            model[4].weight.requires_grad_(False)
    trial = Trial("mlp", stage=1, pipeline={"cut": [3, 2]}, keys={"timeout": 25})
    if kind == "cut" and rank() >= 2:
        trial.pipeline["cut"] = [2, 3]
    return caught(engine_of, model, trial)


@pytest.mark.parametrize("kind", ["shape", "frozen", "cut"])
def test_ranks_with_other_models_are_told_on_every_rank(ranks, kind):
    for name, text in ranks(4)(unlike, kind):
        assert name == "RankMismatch"
        where = {"shape": "2.weight", "frozen": "4.weight", "cut": "weight"}[kind]
        assert where in text and "the ranks built different models" in text
        assert ("rank 1" in text) or kind == "cut"


# -- a second engine -------------------------------------------------------------------------------


def one_after_the_other(ways: list[str]) -> dict[str, Tensor]:
    """The same module and optimizer go from engine to engine, two steps in each."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, way in enumerate(ways):
        engine: Any
        if way == "plain":
            engine = Engine(model, optimizer, settings(3))
        else:
            name, stage = way.split("-")
            keys = {"offload_optim": "cpu"} if stage == "2" else {}
            trial = Trial("mlp", name, int(stage), 2, keys=keys)
            engine = PipeEngine(model, optimizer, trial.config(), loss=F.mse_loss)
        for batch in batches(2 * number + 2, 4)[2 * number :]:
            x, y = (torch.cat(t) for t in zip(*batch, strict=True))
            parts = 4 if way == "plain" else 2
            mine = [t.chunk(parts)[rank() % parts] for t in (x, y)]
            if way == "plain":
                engine.backward(F.mse_loss(engine(mine[0]), mine[1]))
            else:
                engine.train_batch(*mine)
            engine.step()
        engine.close()
    return whole(model)


@pytest.mark.parametrize("ways", [["1f1b-3", "zb_v-2", "plain", "interleaved-1"]], ids=str)
def test_module_and_optimizer_go_from_engine_to_engine(ranks, ways):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(2 * len(ways), 4):
        x, y = (torch.cat(t) for t in zip(*batch, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    for found in ranks(4)(one_after_the_other, ways):
        assert furthest(found, whole(model)) <= 1e-10


def partly() -> dict[str, Any]:
    """A checkpoint that lacks names, and an optimizer with state before there is an engine."""
    model = Holds()
    engine = engine_of(model, Trial("child", "1f1b", 3, 2))
    state = {n: t for n, t in engine.state_dict().items() if "body.0" not in n}
    given = {n: t + 1 for n, t in state.items()}
    strict = caught(engine.load_state_dict, given)
    engine.load_state_dict(given, strict=False)
    here = dict(model.named_parameters(remove_duplicate=False))
    seen = {}
    for name, p in here.items():
        if name not in engine.model.elsewhere:
            with gathered(p):
                seen[name] = p.detach().clone()
    engine.close()
    return {"strict": strict, "whole": whole(model), "seen": seen}


def test_a_checkpoint_that_lacks_names(ranks):
    wanted = {n: t + ("body.0" not in n) for n, t in whole(Holds()).items()}
    for found in ranks(4)(partly):
        assert found["strict"][0] == "CheckpointError" and "body.0.weight" in found["strict"][1]
        assert furthest(found["whole"], wanted) == 0
        assert all(torch.equal(t, wanted[n]) for n, t in found["seen"].items())


# -- costs -----------------------------------------------------------------------------------------


def measured(pipeline: dict[str, Any], sampled: str) -> dict[str, Any]:
    """``sampled``: ``all`` ranks are given one, ``none``, or a ``wrong`` one."""
    model = nn.Sequential(*linear(6, 8, 8, 8), nn.BatchNorm1d(8).double(), *linear(8, 8, 4))
    before = whole(model)
    sample = {"all": rows(0, 1)[0][0], "none": None, "wrong": torch.ones(3, 5)}[sampled]
    trial = Trial("mlp", stage=3, micro_batches=2, pipeline=pipeline, keys={"timeout": 25})
    found: dict[str, Any] = {"engine": None}

    def build() -> None:
        found["engine"] = engine_of(model, trial, sample=sample)

    found["error"] = caught(build)
    if found["error"][0]:
        return found
    engine = found.pop("engine")
    found["same"] = furthest({n: t for n, t in engine.state_dict().items()}, before)
    found["losses"] = [engine.train_batch(*part(b)) and engine.step() for b in batches(2, 2)]
    found["reason"] = engine.arrangement["reason"]
    found["lists"] = str(engine.executor.schedule)
    found["virtual"] = engine.executor.schedule.virtual
    found["holders"] = json.dumps(engine.model.part.holders)
    engine.close()
    return found


@pytest.mark.parametrize("pipeline", [
    {"schedule": "auto", "virtual": 1, "cut": "time"}, {"schedule": "1f1b", "cut": "time"},
], ids=str)  # fmt: skip
def test_costs_are_measured_once_and_all_ranks_cut_alike(ranks, pipeline):
    found = ranks(4)(measured, pipeline, "all")
    for each in found:
        assert each["error"] == ("", "")
        assert each["losses"] == [True, True]
        assert each["holders"] == found[0]["holders"] and each["lists"] == found[0]["lists"]
        assert ("not gpipe" in (each["reason"] or "")) == (pipeline["schedule"] == "auto")
        assert each["virtual"] == 1
    assert found[0]["same"] == 0  # buffers too


@pytest.mark.parametrize(
    ("sampled", "limit", "name", "said"),
    [("none", None, "ConfigError", "sample="), ("wrong", None, "ModelError", "could not measure"),
     ("all", 1, "ConfigError", "no schedule keeps its activations within 1 bytes")],
)  # fmt: skip
def test_what_auto_cannot_do_without(ranks, sampled, limit, name, said):
    pipeline = {"schedule": "auto", "virtual": 1, "memory_limit": limit}
    for each in ranks(2)(measured, pipeline, sampled):
        assert each["error"][0] == name and said in each["error"][1]


def single() -> tuple[list[float], dict[str, Tensor]]:
    model = mlp()
    engine = PipeEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        {
            "trainer": {"gradient_clip_val": None},
            "zero": {"stage": 2},
            "precision": {"compute": "fp32"},
        },
        loss=F.mse_loss,
    )
    losses = [engine.train_batch(*batch[rank()]) for batch in batches(1, 2)]
    engine.step()
    engine.close()
    return losses, whole(model)


def test_a_pipe_of_one_stage_is_plain_training(ranks):
    model = mlp()
    (sum(F.mse_loss(model(x), y) for x, y in batches(1, 2)[0]) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    for _, found in ranks(2)(single):
        assert furthest(found, whole(model)) <= 1e-12
