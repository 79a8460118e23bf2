"""What crosses between stages: any nested value, shapes that change, gradients where there are
some."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_lab import Pipe, gather_weights, scheduled
from small import furthest, rank
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.errors import StageError
from zeroexp.ledger import Ledger
from zeroexp.pipeline.runtime import Channel, Executor, Stage
from zeroexp.pipeline.runtime.message import PREFIX

WAYS = ["gpipe", "1f1b", "zb_h1"]


class Opens(nn.Module):
    """Makes everything that may cross."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(9, 4)
        self.bias = nn.Parameter(torch.randn(4))
        self.double()

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = given["ids"]
        x = self.table(ids)
        return {
            "x": x,
            "again": (x, [x]),
            "ids": ids,
            "mask": ids > 3,
            "fixed": torch.arange(4, dtype=torch.float64),
            "half": x.detach().to(torch.bfloat16),
            "bias": self.bias * 2,
            "unused": x * 3,
            "empty": torch.empty(0, 3),
            "scalar": x.sum(),
            3: {"scale": given["scale"], "flag": True, "none": None, "name": "é"},
        }


class Closes(nn.Module):
    """Uses all of it, and tells what it got."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 3).double()
        self.got: dict[str, Any] = {}

    def forward(self, given: dict[str, Any]) -> Tensor:
        self.got = given
        x, (again, (third,)) = given["x"], given["again"]
        y = x * given["mask"].unsqueeze(-1) + again * given["fixed"] + third * given[3]["scale"]
        y = y + given["bias"] + given["half"].double() + given["scalar"] * 0.1
        return self.last(y + given["ids"].unsqueeze(-1))


def batch(sizes: list[int], length: int, scale: float) -> tuple[list[Any], list[Tensor]]:
    source = torch.Generator().manual_seed(sum(sizes) + length)
    inputs = [
        {"ids": torch.randint(0, 9, (n, length), generator=source), "scale": scale} for n in sizes
    ]
    targets = [torch.randn(n, length, 3, generator=source).double() for n in sizes]
    return inputs, targets


RUNS: list[tuple[list[int], int, float]] = [
    ([2, 2, 2], 5, 0.5),
    ([2, 2, 2], 5, 0.5),
    ([2, 2, 2], 7, 0.5),
    ([1, 3, 2], 5, 0.5),
    ([2, 2, 2], 5, 1.0),
]
"""Samples of the micro-batches, length, a number: what is the same and what changes."""


def crossed(name: str, recompute: bool) -> tuple[list[Any], dict[str, Tensor], list[int], bool]:
    stages = [Opens(), Closes()]
    held = [Stage(rank(), stages[rank()], recompute=recompute)]
    ledger = Ledger()
    channel = Channel.open([0, 1], ledger, 30.0)
    executor = Executor(scheduled(name, 2, 3), held, channel, loss=F.mse_loss)
    losses, control = [], [ledger.comm_bytes()["control"]]
    for run in RUNS:
        losses.append(executor.run(*batch(*run)).loss)
        control.append(ledger.comm_bytes()["control"])
    names = {n: p.grad.clone() for n, p in stages[rank()].named_parameters() if p.grad is not None}
    got = stages[1].got
    right = rank() == 0 or (
        got["x"] is got["again"][0] is got["again"][1][0]
        and got["mask"].dtype == torch.bool
        # A stage that keeps no graph cannot say which of its outputs will have one.
        and (recompute or not (got["fixed"].requires_grad or got["half"].requires_grad))
        and got["half"].dtype == torch.bfloat16
        and got["empty"].shape == (0, 3)
        and got[3] == {"scale": 1.0, "flag": True, "none": None, "name": "é"}
    )
    return losses, names, [b - a for a, b in itertools.pairwise(control)], right


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_nested_values_and_changing_shapes(ranks, name, recompute):
    first, last = Opens(), Closes()
    wanted = []
    for run in RUNS:
        inputs, targets = batch(*run)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs, targets, strict=True):
            loss = F.mse_loss(last(first(x)), y) / len(inputs)
            loss.backward()
            total += loss.detach()
        wanted.append(float(total))
    grads = {n: p.grad for m in (first, last) for n, p in m.named_parameters()}
    found = ranks(2)(crossed, name, recompute)
    for losses, _, _, right in found:
        assert losses == pytest.approx(wanted, abs=1e-12) and right
    assert furthest(gather_weights([g for _, g, _, _ in found]), grads) <= 1e-12
    # Headers go where something is new: at first, with another length, with each size in turn
    # (1, 3, 2 after 2, and 2 is again the last), with another number; a gradient's has no number.
    sender = found[0][2]
    quiet = sender[1]
    assert sender[0] > quiet and sender[2] > quiet and sender[3] > sender[2] and sender[4] > quiet
    back = found[1][2]
    assert back[0] > back[1] == back[4] < back[2] < back[3]
    assert quiet < 3 * 20 * PREFIX


class Gives(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return {"x": x * self.w, "what": {"a set": {1, 2}, "sparse": self.w.to_sparse()}[self.what]}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, given: Any) -> Tensor:
        return given["x"] * self.w


def refused(what: str) -> tuple[str, int | None, str | None, int | None]:
    module = [Gives(what), Takes()][rank()]
    channel = Channel.open([0, 1], Ledger(), 30.0)
    executor = Executor(scheduled("1f1b", 2, 2), [Stage(rank(), module)], channel, loss=F.mse_loss)
    x = [torch.ones(1, 2)] * 2
    try:
        executor.run(x, x)
    except StageError as error:
        return str(error), error.stage, error.action, error.rank
    return "", None, None, None


@pytest.mark.parametrize("what", ["a set", "sparse"])
def test_what_cannot_cross_is_refused_on_every_rank_with_its_place(ranks, what):
    for text, stage, action, at in ranks(2)(refused, what):
        assert "['what']" in text and (stage, action, at) == (0, "F0.0", 0)
        assert {"a set": "a set cannot go", "sparse": "sparse"}[what] in text


def frozen_start(name: str) -> tuple[float | None, list[bool], dict[str, int]]:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    layers[0].requires_grad_(False)
    pipe = Pipe(nn.Sequential(*layers), scheduled(name, 2, 2))
    x = torch.ones(4, 4)
    pipe.run(x, x)
    before = pipe.ledger.comm_bytes().get("send", 0)
    loss = pipe.run(x, x).loss
    sent = pipe.ledger.comm_bytes().get("send", 0) - before
    dist.barrier()
    return loss, [p.grad is None for p in pipe.parameters.values()], {"sent": sent}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_frozen_first_stage_gets_no_gradients(ranks, name):
    (loss, first, sent), (other, second, back) = ranks(2)(frozen_start, name)
    assert loss == other and first == [True, True] and second == [False, False]
    assert sent == {"sent": 2 * 2 * 4 * 4} and back == {"sent": 0}
