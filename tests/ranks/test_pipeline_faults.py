"""A rank that fails ends all of them with its own error, soon; what cannot run is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_lab import SCHEDULES, Pipe, regression_batches, scheduled, tall_mlp
from pool import RankError
from small import caught, rank
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.errors import ModelError, RankMismatch, StageError
from zeroexp.ledger import Ledger
from zeroexp.pipeline.runtime import Channel, Executor, Stage
from zeroexp.pipeline.schedules.registry import make_schedule


class Breaks(nn.Module):
    """Fails in its n-th forward or backward."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.where, self.left = where, number

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.where == "forward":
            self.count()
        if y.requires_grad:
            y.register_hook(lambda grad: self.count() if self.where == "backward" else None)
        return y

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("no more")


Told = tuple[str, int | None, str | None, int | None, str, float | None]


def broken(name: str, stage: int, where: str, number: int) -> Told:
    schedule = scheduled(name, dist.get_world_size(), 6)
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(schedule.num_stages)]
    layers[stage] = Breaks(where, number)
    pipe = Pipe(nn.Sequential(*layers), schedule, timeout=20.0)
    x = torch.randn(12, 6)
    try:
        pipe.run(x, x)
    except StageError as error:
        # The channel has come to rest on every rank: another run goes through.
        loss = pipe.run(x, x).loss
        cause = type(error.__cause__).__name__
        return str(error), error.stage, error.action, error.rank, cause, loss
    return "", None, None, None, "", None


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_failing_stage_ends_all_ranks_with_its_error(ranks, name, where):
    schedule = scheduled(name, 2, 6)
    started = time.monotonic()
    for stage in (0, schedule.num_stages - 1):
        found = ranks(2)(broken, name, stage, where, 3)
        home = schedule.rank_of[stage]
        for r, (text, at, action, by, cause, loss) in enumerate(found):
            assert (at, by) == (stage, home) and action is not None
            assert text == f"rank {home}, {action}, stage {stage}: ArithmeticError: no more"
            assert action.startswith("F" if where == "forward" else ("B", "I", "W"))
            assert cause == ("ArithmeticError" if r == home else "NoneType")
            assert loss is not None and loss == found[0][-1]
    assert time.monotonic() - started < 2 * 20


@pytest.mark.parametrize(
    ("name", "stage", "where"),
    [("1f1b", 1, "forward"), ("zb_v", 5, "backward"), ("breadth_first", 2, "backward")],
)
def test_a_failure_in_the_middle_of_four_ranks(ranks, name, stage, where):
    for text, at, action, *_, loss in ranks(4)(broken, name, stage, where, 2):
        assert at == stage and action is not None and f"{action}, stage {stage}" in text
        assert loss is not None


def dies(at: int) -> None:
    pipe = Pipe(tall_mlp(), scheduled("1f1b", 2, 4), timeout=20.0)
    x, y = regression_batches(1, 8)[0]
    pipe.run(x, y)
    if rank() == at:
        import os

        os._exit(3)
    pipe.run(x, y)


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_dies_is_named(ranks, at):
    with pytest.raises(RankError) as error:
        ranks(2)(dies, at, timeout=40)
    other = next(f for f in error.value.failures if f.rank != at)
    assert other.kind == "CollectiveTimeout" and f"rank {at}" in other.message


def late() -> tuple[str, str]:
    pipe = Pipe(tall_mlp(), scheduled("1f1b", 2, 4), timeout=1.0)
    x, y = regression_batches(1, 8)[0]
    pipe.run(x, y)
    if rank() == 1:
        time.sleep(2.5)
        return "", ""
    return caught(pipe.run, x, y)


def test_a_rank_that_does_not_come_is_named_with_the_action(ranks):
    (name, text), _ = ranks(2)(late)
    assert name == "CollectiveTimeout" and "rank 1" in text and "pipeline RG0.0 on rank 0" in text


def of_two_minds(case: str) -> tuple[str, str]:
    channel = Channel.open([0, 1], Ledger(), 20.0)
    schedule = make_schedule("1f1b", 2, 4 if case != "micro-batches" or rank() else 8)
    if case == "schedule" and rank():
        schedule = make_schedule("gpipe", 2, 4)
    module: nn.Module = nn.Tanh() if case == "empty" and rank() == 0 else nn.Linear(3, 3)
    stage = Stage(rank() if case != "stage" else 0, module)
    loss = None if case == "loss" else F.mse_loss
    return caught(Executor, schedule, [stage], channel, loss=loss)


@pytest.mark.parametrize(
    ("case", "kinds", "words"),
    [
        ("micro-batches", {RankMismatch}, ["4 micro-batches", "8 micro-batches"]),
        ("schedule", {RankMismatch}, ["gpipe", "1f1b", "give every rank the same"]),
        ("empty", {ModelError}, ["stage 0 has no parameters"]),
        ("stage", {ModelError}, ["holds stages [1], it was given [0]"]),
        ("loss", {ModelError}, ["needs a loss"]),
    ],
)
def test_what_does_not_fit_together_is_refused_on_both_ranks(ranks, case, kinds, words):
    for name, text in ranks(2)(of_two_minds, case):
        assert name in {kind.__name__ for kind in kinds}
        assert all(word in text for word in words), text


class Grows(nn.Module):
    """Sends back a gradient of another shape than its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def other_shapes() -> Any:
    pipe = Pipe(nn.Sequential(Grows(), Grows()), scheduled("1f1b", 2, 2), timeout=20.0)
    inputs = [torch.ones(2, 6)] * 2
    targets = [torch.ones(2, 6), torch.ones(3, 6)]
    first = caught(pipe.executor.run, inputs, targets)
    few = caught(pipe.executor.run, inputs[:1], targets)
    stage = pipe.split.stages[0]
    if rank():
        stage.backward = lambda m, grads: [torch.ones(5, 6)]  # type: ignore[method-assign]
    return first, few, caught(pipe.executor.run, inputs, inputs)


def test_shapes_and_counts_that_do_not_fit(ranks):
    for first, few, third in ranks(2)(other_shapes):
        assert first[0] == "StageError" and first[1].startswith("rank 1, F1.1, stage 1: ")
        assert "rank 0, start of the run: ModelError: 1 inputs were given for 2" in few[1]
        assert (
            "rank 0, B0.0, stage 0: RankMismatch: output 0 of stage 0 has shape (2, 6)"
            in (third[1])
        )
