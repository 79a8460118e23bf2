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
