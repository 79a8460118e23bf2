"""One run through a list: its micro-batches, what is under way between stages, its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroexp.errors import ModelError
from zeroexp.pipeline.action import Action
from zeroexp.pipeline.runtime.lane import Way
from zeroexp.pipeline.runtime.message import Message


@dataclass(frozen=True)
class Result:
    """``loss`` is the weighted mean over micro-batches, the same on every rank (None without
    targets); ``outputs`` the last stage's, on its rank after an evaluation without targets."""

    loss: float | None
    outputs: list[Any] | None = None


@dataclass
class Run:
    """``first`` and ``last``: whether this rank holds the first and the last stage; ``count``
    micro-batches; ``weights`` of their losses (None: equal)."""

    count: int
    first: bool
    last: bool
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    weights: Sequence[float] | None
    training: bool
    last_backward: dict[int, Action] = field(default_factory=dict)
    """Of each stage, the action that adds its last gradients."""
    seeds: list[float] = field(default_factory=list)
    handed: dict[tuple[Way, int, int], Message] = field(default_factory=dict)
    """Results not sent or used yet: (way, boundary, micro-batch)."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises :class:`ModelError` where a batch is missing or has another number of parts."""
        count = self.count
        for what, values, here, needed in (
            ("inputs", self.inputs, self.first, True),
            ("targets", self.targets, self.last, self.training),
            ("weights", self.weights, self.last, False),
        ):
            if not here:
                continue
            if values is None and needed:
                raise ModelError(f"this rank's stage needs the micro-batches' {what}")
            if values is not None and len(values) != count:
                raise ModelError(f"{len(values)} {what} were given for {count} micro-batches")
        if self.last and not self.total_weight > 0:
            raise ModelError(f"the weights of the micro-batches' losses sum to {self.total_weight}")

    def seed(self, scale: float, divisor: float | None) -> None:
        """Set what each loss's gradient starts with."""
        total = self.total_weight if divisor is None else divisor
        self.seeds = [scale * self.weight(m) / total for m in range(self.count)]

    def weight(self, micro_batch: int) -> float:
        return 1.0 if self.weights is None else float(self.weights[micro_batch])

    @property
    def total_weight(self) -> float:
        return float(self.count if self.weights is None else sum(self.weights))

    def row(self, *, failed: bool) -> Tensor:
        """What this rank tells the others at the end: (failed, loss, whether there is one)."""
        row = torch.zeros(3, dtype=torch.float64)
        if failed:
            row[0] = 1
        elif self.losses:
            order = sorted(self.losses)
            losses = torch.stack([self.losses[m].reshape(()) for m in order]).double().cpu()
            share = torch.tensor([self.weight(m) for m in order], dtype=torch.float64)
            row[1], row[2] = (losses * share).sum() / share.sum(), 1
        return row

    def result(self, rows: Tensor) -> Result:
        """From every rank's :meth:`row`."""
        known = rows[rows[:, 2] > 0, 1]
        outputs = [self.outputs[m] for m in sorted(self.outputs)] if self.outputs else None
        return Result(float(known[0]) if known.numel() else None, outputs)
