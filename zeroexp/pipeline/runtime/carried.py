"""Losses that modules make in their own forward, on their way to the loss function.

It is on the last stage, they are made on all. A scalar goes from stage to stage beside the
activations, each adds its own, and the gradient comes back on the same way: whatever the loss
function makes of the sum, every stage gets its part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from zeroexp.pipeline.runtime.stage import Call, Stage
from zeroexp.zero.companion import Companion, Forward, Section


def carry_losses(
    stages: Sequence[Stage], parts: Sequence[Sequence[nn.Module]], companions: Sequence[Companion]
) -> None:
    """Have the ``stages`` of this rank bring the losses of all stages to the last one; ``parts``
    are the modules of each stage of the pipe."""
    last = len(parts) - 1
    for companion in companions:
        sections = [companion.section(part) for part in parts]
        makes = [section is not None and section.makes_losses for section in sections]
        whole = companion.section([module for part in parts for module in part])
        for stage in stages:
            index = stage.index
            enters = any(makes[:index])
            if sections[index] is None and not enters:
                continue
            stage.call = CarriedLoss(
                stage.call,
                sections[index],
                enters=enters,
                leaves=any(makes[: index + 1]) and index < last,
                sink=whole if enters and index == last else None,
            )


class CarriedLoss:
    """Calls a stage's module by ``inside``; ``own`` are those of its modules that make losses.

    ``enters`` and ``leaves``: whether argument and result are pairs with the sum of the losses so
    far (None in an evaluation). ``sink`` gets the sum of all, on the last stage.
    """

    def __init__(
        self,
        inside: Call,
        own: Section | None,
        *,
        enters: bool,
        leaves: bool,
        sink: Section | None,
    ) -> None:
        self._inside, self._own = inside, own
        self._enters, self._leaves, self._sink = enters, leaves, sink

    def __call__(self, module: nn.Module, value: Any, kind: Forward) -> Any:
        before: Tensor | None = None
        if self._enters:
            value, before = value
        with nullcontext() if self._own is None else self._own.forward(kind):
            output = self._inside(module, value, kind)
        if self._sink is not None:
            if before is not None:
                self._sink.give_losses(before)
            return output
        if not self._leaves:
            return output
        own = None if self._own is None else self._own.take_losses()
        return output, own if before is None else before if own is None else before + own
