"""Which numbers of which parameter a rank owns, and whole values that are read and set.

Rows 25, 26 and 49 of deepspeed 3.C; the places follow from the documented rule (parameters at
multiples of 16 elements, the segment rounded up to 16 per rank), the values from their text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import STAGES, furthest, micro_batches, rank, regression, settings
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine
from zeroexp.layout import ParamSpec, make_layout


class Ranked(nn.Module):
    """Every gradient is the number of the rank."""

    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in numels)

    def forward(self) -> Tensor:
        return sum(((p * rank()).sum() for p in self.parts), torch.zeros(()))


def owned(stage: int, numels: tuple[int, ...]) -> tuple[list[float], list[list[float]]]:
    """What this rank owns of the reduced gradients, and all of each parameter's."""
    module = Ranked(*numels)
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), settings(stage))
    engine.backward(engine())
    (segment,) = engine.model.trainable_segments
    mine = segment.grads.owned.tolist()
    whole = [engine.full_grad(p) for p in module.parameters()]
    engine.close()
    return mine, [[] if t is None else t.tolist() for t in whole]


H, Z = 0.5, 0.0
SHARDS = {
    (6,): [[H] * 6 + [Z] * 10, [Z] * 16],
    (6, 3): [[H] * 6 + [Z] * 10, [H] * 3 + [Z] * 13],
    (24, 3): [[H] * 24 + [Z] * 8, [H] * 3 + [Z] * 29],
    (40, 6): [[H] * 32, [H] * 8 + [Z] * 8 + [H] * 6 + [Z] * 10],
}
"""Sizes of the parameters to what ranks 0 and 1 own of their gradients."""


def test_ds25_ds26_a_reduction_leaves_each_rank_its_shard(ranks):
    """deepspeed 3.C 25, 26: gradients 0 on one rank and 1 on the other are 0.5 to the bit, each
    number on one rank only, and padding stays 0."""
    for numels, wanted in SHARDS.items():
        for stage in (2, 3):
            found = ranks(2)(owned, stage, numels)
            assert [mine for mine, _ in found] == wanted, (numels, stage)
            for _, whole in found:
                assert whole == [[H] * n for n in numels]


def test_ds26_the_layout_says_the_same_without_a_tensor():
    """deepspeed 3.C 26: which part of which parameter is where, from shapes alone."""
    specs = [ParamSpec("a", (5, 8)), ParamSpec("b", (6,))]
    (segment,) = make_layout(specs, cut="model", shards=2).segments
    found = [
        [(p.slot.spec.name, p.param_start, p.shard_start, p.numel) for p in segment.pieces(i)]
        for i in (0, 1)
    ]
    assert found == [[("a", 0, 0, 32)], [("a", 32, 0, 8), ("b", 0, 16, 6)]]
    assert (segment.size, segment.padding) == (64, 18)
    assert [segment.padding_in(i) for i in (0, 1)] == [0, 18]


def trained(compute: str, stage: int, round_trip: bool) -> dict[str, Any]:
    """Four steps; with ``round_trip`` all that can be read after two is set again after three, and
    the third begins anew."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    keys = {"scale_init": 1024.0} if compute == "fp16" else {}
    engine = Engine(module, optimizer, settings(stage, compute=compute, **keys))
    found: dict[str, Any] = {}
    for step, batch in enumerate(regression(4, 4, 5, 3)):
        ((x, y),) = micro_batches(batch, 1)
        engine.backward(F.mse_loss(engine(x).float(), y))
        if step == 2:
            grads = {n: engine.full_grad(p) for n, p in module.named_parameters()}
            found["grads"] = {n: g.clone() for n, g in grads.items() if g is not None}
            again = {n: engine.full_grad(p) for n, p in module.named_parameters()}
            found["grads again"] = {n: g for n, g in again.items() if g is not None}
        engine.step()
        if step == 1 and round_trip:
            values, state = engine.state_dict(), engine.optimizer_state_dict(optimizer)
            engine.backward(-engine(x).float().sum())  # another way, which setting must undo
            engine.step()
            found["strayed"] = furthest(engine.state_dict(), values)
            engine.load_state_dict(values)
            engine.load_optimizer_state_dict(optimizer, state)
            found["values"] = furthest(engine.state_dict(), values)
            later = engine.optimizer_state_dict(optimizer)
            found["state"] = [
                torch.equal(torch.as_tensor(later["state"][i][key]), torch.as_tensor(value))
                for i, entry in state.get("state", {}).items()
                for key, value in entry.items()
            ]
    found["end"] = engine.state_dict()
    found["moments"] = {
        f"{i}.{key}": torch.as_tensor(value)
        for i, entry in engine.optimizer_state_dict(optimizer).get("state", {}).items()
        for key, value in entry.items()
    }
    engine.close()
    return found


def third_gradients() -> dict[str, Tensor]:
    """Of the third step, in one process on the global batch, in fp32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for x, y in regression(4, 4, 5, 3)[:3]:
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return grads


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_ds49_what_is_read_can_be_set_and_changes_nothing(ranks, compute):
    """deepspeed 3.C 49: values, moments, counts and gradients of each parameter are readable whole
    at every stage; what was read and set again is the same to the bit, and so is all training
    after it."""
    wanted = third_gradients()
    for stage in STAGES:
        plain, set_again = (ranks(2)(trained, compute, stage, which)[0] for which in (False, True))
        assert set_again["strayed"] > 1e-3 and set_again["values"] == 0
        assert len(set_again["state"]) == 4 * 3 and all(set_again["state"])
        for name in ("end", "moments", "grads", "grads again"):
            assert furthest(plain[name], set_again[name]) == 0, (stage, name)
        assert furthest(plain["grads"], plain["grads again"]) == 0
        assert all(g.dtype == torch.float32 for g in plain["grads"].values())
        if compute == "fp32":
            assert furthest(plain["grads"], wanted) <= 1e-6


def edited(stage: int, compute: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """How far the values are from those before, after edits that touch nothing or one bias."""
    module = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = Engine(module, optimizer, settings(stage, compute=compute))
    engine.backward(engine(torch.ones(2, 5)).float().sum())
    engine.step()
    before, found = engine.state_dict(), {}
    with zeroexp.gathered(module, modify_rank=0):
        pass
    found["nothing"] = furthest(engine.state_dict(), before)
    with zeroexp.gathered(module, modify_rank=0), torch.no_grad():
        for p in module.parameters():
            p.copy_(p.clone())
    found["the same"] = furthest(engine.state_dict(), before)
    with zeroexp.gathered(module.bias, modify_rank=0), torch.no_grad():
        module.bias[0] = 0.25
    return found, {name: after - before[name] for name, after in engine.state_dict().items()}


def test_ds49_an_edit_leaves_alone_what_it_does_not_change(ranks):
    """deepspeed 3.C 49: a value that is set to what it was round-trips to the bit; the fp32 master
    behind a narrow parameter is not rounded to it."""
    for compute in ("fp32", "bf16", "fp16"):
        for stage in STAGES:
            same, moved = ranks(2)(edited, stage, compute)[0]
            assert same == {"nothing": 0.0, "the same": 0.0}, (compute, stage)
            assert [bool(t) for t in moved["bias"]] == [True, False, False], (compute, stage)
            assert not moved["weight"].any(), (compute, stage)
