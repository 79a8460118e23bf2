"""Odd outputs and classes, retries, several engines, buffers and autocast under sharding.

Cases of deepspeed 3.C and 3.D and Z3 ids of published reports; values come from plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from small import (
    STAGES,
    caught,
    furthest,
    micro_batches,
    mlp,
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


# -- outputs, classes, lifecycles ----------------------------------------------------------------
@dataclass
class Out:
    hidden: Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    a: Tensor
    b: tuple[Tensor, ...]


class Odd(nn.Module):
    """A block that returns what it is told to: a dataclass, a named tuple, nested containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        if isinstance(x, Out):
            x = x.hidden + x.extra["list"][0]
        elif isinstance(x, Pair):
            x = x.a + x.b[0]
        elif isinstance(x, dict):
            x = x["x"][0]
        y = torch.tanh(self.layer(x))
        if self.kind == "dataclass":
            return Out(y, {"list": [y * 0.5, "text"], "none": None})
        if self.kind == "namedtuple":
            return Pair(y, (y * 2, y))
        return {"x": [y, {"deep": (y, 3)}]} if self.kind == "dict" else y


def odd_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Odd("dataclass"), Odd("namedtuple"), Odd("dict"), Odd("tensor"))


def odd_outputs(stage: int) -> dict[str, Tensor]:
    engine = sgd_engine(odd_model(), stage)
    for x, y in regression(3, 4, 5, 5):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_ds46_modules_that_return_containers(ranks, stage):
    """deepspeed 3.C 46: dataclass, named tuple, dict, nested: as in one process."""
    module = odd_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wanted = plain_training(module, optimizer, regression(3, 4, 5, 5))
    assert furthest(ranks(2)(odd_outputs, stage)[0], wanted) <= 1e-6


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


class Delegating(nn.Module):
    """Looks up unknown attributes in what it wraps, and is of a class made on the fly."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def dynamic(stage: int) -> tuple[dict[str, Tensor], str, bool]:
    inner = mlp(5, 5, 5)
    inner.label = "inside"
    module = type("Made", (Delegating,), {"doubled": lambda self, x: 2 * self(x)})(inner)
    engine = sgd_engine(module, stage)
    for x, y in regression(2, 4, 5, 5):
        with engine.scope():
            loss = F.mse_loss(module.doubled(part(x)), part(y))
        engine.backward(loss)
        engine.step()
    return engine.state_dict(), module.label, type(module).__name__ == "Made"


def test_ds58_dynamic_classes_and_delegated_attributes(ranks):
    """deepspeed 3.C 58: class, attributes and methods of the module stay what they were."""
    inner = mlp(5, 5, 5)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for x, y in regression(2, 4, 5, 5):
        optimizer.zero_grad()
        F.mse_loss(2 * inner(x), y).backward()
        optimizer.step()
    wanted = {f"inner.{name}": t for name, t in weights(inner).items()}
    for stage in STAGES:
        whole, label, same = ranks(2)(dynamic, stage)[0]
        assert furthest(whole, wanted) <= 1e-6 and label == "inside" and same


def several_engines(stages: tuple[int, int], combined: bool) -> list[dict[str, Tensor]]:
    modules = [mlp(5, 6, 5, seed=seed) for seed in (1, 2)]
    engines = [sgd_engine(m, s) for m, s in zip(modules, stages, strict=True)]
    for x, y in regression(3, 4, 5, 5):
        losses = [F.mse_loss(engine(part(x)), part(y)) for engine in engines]
        if combined:
            (losses[0] + 3 * losses[1]).backward()
        else:
            engines[1].backward(3 * losses[1])
            engines[0].backward(losses[0])
        for engine in engines:
            engine.step()
    return [engine.state_dict() for engine in engines]


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("stages", [(0, 3), (3, 3), (1, 2)])
def test_ds68_engines_in_one_process_are_independent(ranks, stages, combined):
    """deepspeed 3.C 68, 59: two models, own or combined loss, of different stages."""
    found = ranks(2)(several_engines, stages, combined)[0]
    for whole, seed, factor in zip(found, (1, 2), (1, 3), strict=True):
        module = mlp(5, 6, 5, seed=seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wanted = plain_training(
            module, optimizer, regression(3, 4, 5, 5), lambda a, b, k=factor: k * F.mse_loss(a, b)
        )
        assert furthest(whole, wanted) <= 1e-6


class Shuffled(nn.Module):
    """Blocks in the order they are asked for, some not at all, some twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.blocks[3].double()

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x.to(self.blocks[index].weight.dtype)))
        return x.float()


ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2,), (0, 0, 3), (1, 2, 1), (0, 1, 2, 3))


def shuffled(stage: int, prefetch: int, reduce: str) -> dict[str, Tensor]:
    module = Shuffled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    keys = settings(stage, zero_prefetch=prefetch, zero_reduce=reduce, accumulate=2)
    engine = Engine(module, optimizer, keys)
    for step, (x, y) in enumerate(regression(len(ORDERS), 8, 5, 5)):
        for micro, (a, b) in enumerate(micro_batches((x, y), 2)):
            order = ORDERS[(step + micro) % len(ORDERS)]
            engine.backward(F.mse_loss(engine(a, order), b), last=micro == 1)
        with torch.no_grad():
            engine(x, ORDERS[-1 - step])
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_order_of_modules_that_changes(ranks, prefetch, reduce):
    """Another order, repeated and left out blocks in every micro-batch, one in fp64: as torch."""
    module = Shuffled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step, batch in enumerate(regression(len(ORDERS), 8, 5, 5)):
        optimizer.zero_grad()
        for part_of in range(2):
            for micro, (a, b) in enumerate(micro_batches(batch, 2, part_of, 2)):
                order = ORDERS[(step + micro) % len(ORDERS)]
                (F.mse_loss(module(a, order), b) / 4).backward()
        optimizer.step()
    for stage in STAGES:
        whole = ranks(2)(shuffled, stage, prefetch, reduce)[0]
        assert furthest(whole, weights(module)) <= 1e-6, f"stage {stage}"


# -- dtypes --------------------------------------------------------------------------------------
class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("freqs", torch.linspace(0.001, 1.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.freqs.to(x.dtype)


def buffers_in_bf16(stage: int) -> tuple[str, bool, str]:
    module = Rotary()
    engine = sgd_engine(module, stage, compute="bf16")
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    same = torch.equal(module.freqs, torch.linspace(0.001, 1.0, 4))
    return str(module.freqs.dtype), same, str(module.layer.weight.dtype)


def test_ds76_buffers_keep_their_precision(ranks):
    """deepspeed 3.D 76: a rotary table stays fp32 when the parameters become bf16."""
    for stage in (0, 3):
        assert ranks(2)(buffers_in_bf16, stage) == [("torch.float32", True, "torch.bfloat16")] * 2


def autocast_training(stage: int) -> tuple[dict[str, Tensor], list[str]]:
    engine = sgd_engine(mlp(6, 8, 3), stage)
    kinds = []
    for x, y in regression(3, 4, 6, 3):
        with torch.autocast("cpu", torch.bfloat16):
            out = engine(part(x))
            with torch.autocast("cpu", enabled=False):
                exact = F.linear(part(y), torch.eye(3))
            kinds += [str(out.dtype), str(exact.dtype)]
        engine.backward(F.mse_loss(out.float(), exact))
        engine.step()
    return engine.state_dict(), sorted(set(kinds))


def test_ds77_the_users_own_autocast_is_respected(ranks):
    """deepspeed 3.D 77, 3.C 35: bf16 inside, fp32 where switched off.

    Torch computes each rank's half by itself, in the same autocast: all roundings to bf16 are the
    same then, and what is left is one sum of two in fp32 per step. Training without autocast is a
    thousand times further away.
    """
    module, exact = mlp(6, 8, 3), mlp(6, 8, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in regression(3, 4, 6, 3):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                out = module(a)
            (F.mse_loss(out.float(), b) / 2).backward()
        optimizer.step()
    in_fp32 = plain_training(
        exact, torch.optim.SGD(exact.parameters(), lr=0.1), regression(3, 4, 6, 3)
    )
    assert furthest(in_fp32, weights(module)) > 1e-4
    for stage in STAGES:
        whole, kinds = ranks(2)(autocast_training, stage)[0]
        assert kinds == ["torch.bfloat16", "torch.float32"]
        assert furthest(whole, weights(module)) <= 1e-7
