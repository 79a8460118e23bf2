"""Losses that modules make in their own forward, on their way to the loss function.

It is on the last stage, they are made on all. A vector goes from stage to stage beside the
activations, to which each adds its own at the end, and the gradients come back on the same way:
whatever the loss function makes of a loss, the module that made it gets its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.errors import ModelError
from zeroexp.pipeline.runtime.stage import Call, Stage
from zeroexp.zero.companion import Companion, Forward, Section


def carry_losses(
    stages: Sequence[Stage], parts: Sequence[Sequence[nn.Module]], companions: Sequence[Companion]
) -> None:
    """Have the ``stages`` of this rank bring the losses of all stages to the last one; ``parts``
    are the modules of each stage of the pipe. Raises :class:`ModelError` for modules that a stage
    cannot run again."""
    for companion in companions:
        sections = [companion.section(part) for part in parts]
        for stage in stages:
            own, before = sections[stage.index], sections[: stage.index]
            if stage.recompute and own is not None and own.draws_apart:
                raise ModelError(
                    f"stage {stage.index} runs its forward again, but modules of it draw from "
                    "generators of their own, which are not set back: build them without one, or "
                    "turn recompute off"
                )
            carried = CarriedLosses(
                stage.call,
                own,
                [section for section in before if section is not None and section.num_losses],
                is_last=stage.index == len(parts) - 1,
            )
            if own is not None or carried.num_before:
                stage.call = carried


class CarriedLosses:
    """Calls a stage's module by ``inside``; ``own`` are those of its modules that make losses,
    ``before`` those of the stages before.

    Argument and result are pairs with a vector of the losses so far (None where there are none, as
    in an evaluation) from the first stage that makes some to the last one, where each module gets
    back what it made.
    """

    def __init__(
        self, inside: Call, own: Section | None, before: Sequence[Section], *, is_last: bool
    ) -> None:
        self._inside, self._own, self._before, self._is_last = inside, own, before, is_last
        self._sizes = [section.num_losses for section in before]
        self.num_before = sum(self._sizes)
        self._num_own = 0 if own is None else own.num_losses

    def __call__(self, module: nn.Module, value: Any, kind: Forward) -> Any:
        losses: Tensor | None = None
        if self.num_before:
            value, losses = value
        with nullcontext() if self._own is None else self._own.forward(kind):
            output = self._inside(module, value, kind)
        if self._is_last:
            if losses is not None:
                for section, theirs in zip(self._before, losses.split(self._sizes), strict=True):
                    section.give_losses(theirs)
            return output
        if self.num_before + self._num_own == 0:
            return output
        return output, self._with_own(losses)

    def _with_own(self, losses: Tensor | None) -> Tensor | None:
        own = None if self._own is None else self._own.take_losses()
        if not self.num_before:
            return own
        if not self._num_own or (own is None and losses is None):
            return losses
        if losses is None:
            assert own is not None  # for the type checker
            losses = own.new_zeros(self.num_before)
        return torch.cat((losses, losses.new_zeros(self._num_own) if own is None else own))
