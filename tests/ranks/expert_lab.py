"""A small model with experts, trained by the engine at any expert-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.moe import MLP, MoE, auxiliary_loss

WIDTH, ROWS = 8, 6


def net() -> nn.Module:
    """One expert as a module of its own."""
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


EXPERTS: dict[str, Any] = {"mlp": MLP(6), "modules": net}


class Block(nn.Module):
    def __init__(self, degree: int, expert: str, keys: Mapping[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        given = {"top_k": 2, **keys}
        self.moe = MoE(WIDTH, EXPERTS[expert], 4, expert_parallel=degree, **given)
        with torch.no_grad():
            self.moe.gate.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(torch.tanh(self.dense(x)))


def model_of(degree: int, expert: str = "mlp", **keys: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(degree, expert, keys) for _ in range(2)))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    return (y - x.flip(1)).square().mean() + auxiliary_loss(model)


def engine_of(
    model: nn.Module, keys: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> Engine:
    made = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    fixed = {"trainer.devices": dist.get_world_size(), "precision.compute": "fp32"}
    return Engine(model, made, Config.from_mapping({**fixed, **keys}))


def steps(
    engine: Engine, count: int, *, first: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    for step in range(first, first + count):
        for micro in range(engine.accumulate):
            x = batch(100 * step + micro, dist.get_rank(), dtype)
            engine.backward(loss_of(engine.module, engine(x), x))
        engine.step()


def trained(
    degree: int,
    keys: Mapping[str, Any],
    *,
    expert: str = "mlp",
    count: int = 10,
    dtype: torch.dtype = torch.float32,
    adam: bool = False,
) -> dict[str, Any]:
    """Whole weights (on rank 0), norms and parameters held here after ``count`` steps."""
    model = model_of(degree, expert).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if adam else None
    engine = engine_of(model, {"precision.compute": "fp32", **keys}, optimizer)
    norms = []
    for step in range(count):
        steps(engine, 1, first=step, dtype=dtype)
        norms.append(engine.grad_norm)
    found = {"weights": engine.state_dict(), "norms": norms}
    engine.close()
    return found


def each(degrees: Sequence[int], keys: Mapping[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [trained(degree, keys, **more) for degree in degrees]


def each_stage(degree: int, keys: Mapping[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [trained(degree, {**keys, "zero.stage": stage}, **more) for stage in range(4)]
