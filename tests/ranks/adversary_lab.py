"""One training loop for both sides: an engine on its part of the batch, plain torch on all of it.

A case is a function of a :class:`Side`; it trains and returns weights. ``compare`` runs it on the
ranks at every stage and in this process with plain torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from small import STAGES, digest, furthest, rank, settings, world
from torch import Tensor, nn

from zeroexp.engine import Engine


class Plain:
    """What an engine does, by torch alone, for one process with the global batch."""

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], accumulate: int
    ) -> None:
        self.module, self.optimizers, self.accumulate = module, optimizers, accumulate
        self._micro, self._due = 0, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: bool) -> None:
        self._micro = 1 if self._due else self._micro + 1
        self._due = self._micro >= self.accumulate
        (loss / self.accumulate).backward(**kwargs)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if not self._due:
            return
        for one in self.optimizers if optimizer is None else [optimizer]:
            one.step()
            one.zero_grad()

    def zero_grad(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for one in self.optimizers if optimizer is None else [optimizer]:
            one.zero_grad()

    def clip_norm(self, limit: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        chosen = self.optimizers if optimizer is None else [optimizer]
        params = [p for o in chosen for g in o.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(params, limit)

    def clip_value(self, limit: float) -> None:
        nn.utils.clip_grad_value_(self.module.parameters(), limit)

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        return param.grad

    def state_dict(self) -> dict[str, Tensor]:
        return {n: t.detach().clone() for n, t in self.module.state_dict().items()}


class Side:
    """Where a case runs: a stage of the engine, or plain torch (``stage`` is ``None``)."""

    def __init__(self, stage: int | None, **keys: Any) -> None:
        self.stage, self._keys = stage, keys

    def engine(self, module: nn.Module, *optimizers: torch.optim.Optimizer, **keys: Any) -> Any:
        keys = {"timeout": 20, **self._keys, **keys}
        if self.stage is None:
            return Plain(module, optimizers, keys.get("accumulate", 1))
        return Engine(module, list(optimizers), settings(self.stage, **keys))

    def part(self, t: Tensor) -> Tensor:
        """This rank's rows of a global batch; all of them for plain torch."""
        return t if self.stage is None else t.chunk(world())[rank()]


def play(
    module: str, case: str, stages: Sequence[int], keys: dict[str, Any]
) -> dict[int, dict[str, Tensor]]:
    """On a rank: the weights ``case`` ends with at each stage."""
    function: Callable[[Side], dict[str, Tensor]] = getattr(importlib.import_module(module), case)
    out = {}
    for stage in stages:
        torch.manual_seed(0)
        out[stage] = {n: t.clone() for n, t in function(Side(stage, **keys)).items()}
    return out


def compare(
    ranks: Any,
    num_ranks: int,
    case: Callable[[Side], dict[str, Tensor]],
    *,
    stages: Sequence[int] = STAGES,
    tolerance: float = 1e-6,
    timeout: float = 60.0,
    **keys: Any,
) -> None:
    """``case`` gives the same bits at every stage, and what plain torch gives."""
    torch.manual_seed(0)
    wanted = case(Side(None, **keys))
    found = ranks(num_ranks)(
        play, case.__module__, case.__name__, list(stages), keys, timeout=timeout
    )[0]
    first = digest(found[stages[0]])
    gaps = {stage: furthest(weights, wanted) for stage, weights in found.items()}
    assert max(gaps.values()) <= tolerance, gaps
    same = {stage: digest(weights) == first for stage, weights in found.items()}
    assert all(same.values()), same


def batches(steps: int, rows: int = 8, width: int = 6, seed: int = 5) -> list[Tensor]:
    """``steps`` global batches ``[rows, width]``, the same everywhere."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=source) for _ in range(steps)]
