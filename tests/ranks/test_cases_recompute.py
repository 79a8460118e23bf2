"""Activation checkpointing under sharding: retries, reuse, recursion, frozen modules.

Row 41 of deepspeed 3.C; values come from plain torch in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import (
    STAGES,
    caught,
    furthest,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroexp.engine import Engine


def part(t: Tensor) -> Tensor:
    return t.chunk(world())[rank()]


class Flaky(nn.Module):
    """Recomputes its blocks in backward; raises in the block's forward when told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.fail_at = -1
        self.calls = 0

    def one(self, index: int, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.blocks[index](x)
        if self.calls == self.fail_at:  # before the end, which a recomputation may not reach
            raise KeyError("on purpose")
        return torch.tanh(y)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(3):
            x = checkpoint(self.one, index, x, use_reentrant=False)
        return x


def retry(stage: int) -> tuple[list[str], dict[str, Tensor]]:
    module = Flaky()
    engine = sgd_engine(module, stage)
    errors = []
    for i, (x, y) in enumerate(regression(3, 4, 5, 5)):
        for fail_at in (2, 5, -1):  # in forward, in the recomputation, not at all
            module.calls, module.fail_at = 0, fail_at if i == 1 else -1
            error, _ = caught(
                lambda a=x, b=y: engine.backward(F.mse_loss(engine(part(a)), part(b)))
            )
            if not error:
                break
            engine.zero_grad()
            errors.append(error)
        engine.step()
    return errors, engine.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_ds41_a_forward_or_recompute_that_raises_can_be_retried(ranks, stage, num_ranks):
    """deepspeed 3.C 41: after an exception on all ranks the same batch trains as if nothing was."""
    module = Flaky()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wanted = plain_training(module, optimizer, regression(3, 4, 5, 5))
    errors, whole = ranks(num_ranks)(retry, stage)[0]
    assert errors == ["KeyError", "KeyError"]
    assert furthest(whole, wanted) <= 1e-6


class Reused(nn.Module):
    """Checkpointed parts of two blocks each; the input needs no gradient.

    ``used`` are the blocks of each part in order; ``seen`` are the units that are whole right after
    each block's forward, in the forward pass and when it is computed again.
    """

    def __init__(self, used: tuple[tuple[int, ...], ...], frozen: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        for index in frozen:
            self.blocks[index].requires_grad_(False)
        self.used = used
        self.look: Any = list
        self.seen: list[tuple[int, list[str]]] = []

    def one(self, blocks: tuple[int, ...], x: Tensor, before: Tensor) -> Tensor:
        for index in blocks:
            x = self.blocks[index](x)
            self.seen.append((index, self.look()))  # a recomputation ends with what is kept last
            x = torch.tanh(x)
        return x + before

    def forward(self, x: Tensor, chained: bool) -> Tensor:
        out = torch.zeros_like(x)
        for blocks in self.used:
            fresh = out if chained and out.requires_grad else x
            out = checkpoint(self.one, blocks, fresh, out, use_reentrant=False)
        return out


def recomputed(
    used: tuple[tuple[int, ...], ...], frozen: tuple[int, ...], chained: bool
) -> tuple[list[tuple[int, list[str]]], list[str], dict[str, Tensor]]:
    """What was whole in the second step's backward and after it; the weights."""
    module = Reused(used, frozen)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    engine = Engine(module, optimizer, settings(3, zero_prefetch=0))
    module.look = lambda: list(engine.ledger.holders("whole"))
    for x, y in regression(2, 4, 5, 5):
        loss = F.mse_loss(engine(part(x), chained), part(y))
        module.seen = []
        engine.backward(loss)
        after = list(engine.ledger.holders("whole"))
        engine.step()
    return module.seen, after, engine.state_dict()


def recomputed_by_torch(
    used: tuple[tuple[int, ...], ...], frozen: tuple[int, ...], chained: bool
) -> dict[str, Tensor]:
    module = Reused(used, frozen)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for x, y in regression(2, 4, 5, 5):
        optimizer.zero_grad()
        F.mse_loss(module(x, chained), y).backward()
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ds41_a_reused_checkpointed_module_is_released_after_its_last_use(ranks, num_ranks):
    """deepspeed 3.C 41: block 0 is used by two recomputed parts, others before, between and after.
    It may stay whole from one of its uses to the next; no other block is whole beside the one that
    runs, and nothing is when the backward is over."""
    case = ((1,), (0,), (2,), (0,), (3,)), (), True
    found = ranks(num_ranks)(recomputed, *case)
    for seen, after, _ in found:
        assert [index for index, _ in seen] == [3, 0, 2, 0, 1]  # computed again, from the end
        others = [[unit for unit in units if unit != "blocks.0"] for _, units in seen]
        assert others == [["blocks.3"], [], ["blocks.2"], [], ["blocks.1"]]
        assert "blocks.0" not in seen[0][1] and "blocks.0" not in seen[-1][1]
        assert after == []
    assert furthest(found[0][2], recomputed_by_torch(*case)) <= 1e-6


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ds41_a_frozen_module_without_backward_is_released_after_its_use(ranks, num_ranks):
    """deepspeed 3.C 41: blocks 0 and 2 are frozen and their input needs no gradient, so nothing in
    backward uses them; computed again, they are whole for that and no longer."""
    case = ((0, 1), (2, 3)), (0, 2), False
    found = ranks(num_ranks)(recomputed, *case)
    for seen, after, _ in found:
        assert [index for index, _ in seen] == [2, 3, 0, 1]
        parts = {index: units for index, units in seen}
        assert parts[3] == ["blocks.3"] and parts[1] == ["blocks.1"], seen
        assert "blocks.2" not in parts[0] and "blocks.3" not in parts[0], seen
        assert after == []
    assert furthest(found[0][2], recomputed_by_torch(*case)) <= 1e-6


class Recursive(nn.Module):
    """Calls itself inside of its own forward, which is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.head = nn.Linear(5, 5)

    def one(self, x: Tensor, depth: int) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        return checkpoint(self.one, x, depth - 1, use_reentrant=False) if depth else x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.one, x, 2, use_reentrant=False))


def recursive(stage: int) -> tuple[dict[str, Tensor], list[list[str]]]:
    engine = sgd_engine(Recursive(), stage, zero_reshard_after_forward="true")
    after = []
    for x, y in regression(2, 4, 5, 5):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        after.append(list(engine.ledger.holders("whole")))
        engine.step()
    return engine.state_dict(), after


def test_ds41_recomputations_inside_one_another_are_released(ranks):
    """deepspeed 3.C 41: three uses of one module, each computed again inside the one before."""
    module = Recursive()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wanted = plain_training(module, optimizer, regression(2, 4, 5, 5))
    for stage in STAGES:
        found = ranks(2)(recursive, stage)
        assert [after for _, after in found] == [[[], []]] * 2
        assert furthest(found[0][0], wanted) <= 1e-6
