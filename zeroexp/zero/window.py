"""The micro-batches between two steps, and the loss scale that their gradients share."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.precision import LossScale


class Window:
    """Counts the micro-batches of one step.

    ``accumulate``: micro-batches per step in the plain loop. ``reduce_each``: every backward
    reduces, not the last alone. ``divides``: gradients are divided by ``accumulate`` here.
    """

    def __init__(
        self, scale: LossScale, *, accumulate: int, reduce_each: bool, divides: bool
    ) -> None:
        self._scale = scale
        self._reduce_each = reduce_each
        self._divides = divides
        self._held_scale: float | None = None
        self.accumulate = accumulate
        self.micro_steps = 0
        """Backwards since the last step or ``zero_grad``."""
        self.complete = True
        """Whether a step may follow the last backward."""
        self.unreduced = False
        """Whether the last backward left its gradients where they arrived."""
        self._finite: list[Tensor] = []

    @property
    def loss_scale(self) -> float:
        """Factor on the loss of the next backward. It changes only while no gradients are held:
        those of another optimizer that waits for its step must be unscaled with the scale that
        produced them."""
        return self._held_scale if self._held_scale is not None else self._scale.value

    @property
    def parts(self) -> int:
        """What gradients are divided by, beside the number of ranks."""
        return self.accumulate if self._divides else 1

    @property
    def divides_on_arrival(self) -> bool:
        """Whether each gradient is divided as it arrives, or their sum before its reduction."""
        return self._reduce_each or self.accumulate == 1

    @property
    def unfinished(self) -> bool:
        """Whether some, but not all micro-batches of a step are through."""
        return 0 < self.micro_steps < self.accumulate

    def begin(self, last: bool | None) -> bool:
        """A backward begins; ``last`` says whether a step follows, ``None`` leaves it to the count.
        Returns whether this backward reduces."""
        self._held_scale = self.loss_scale
        self.micro_steps += 1
        self.complete = self.micro_steps >= self.accumulate if last is None else last
        reduces = self._reduce_each or self.complete
        self.unreduced = not reduces
        return reduces

    def saw_loss(self, loss: Tensor) -> None:
        """Note the loss of one micro-batch; nothing waits for its value before the boundary."""
        self._finite.append(torch.isfinite(loss.detach()))  # not the loss: it holds more memory

    @property
    def loss_finite(self) -> bool:
        """Whether all losses of this rank were finite."""
        return all(bool(finite) for finite in self._finite)

    def restart(self) -> None:
        """The count begins anew."""
        self.micro_steps = 0

    def forget(self, *, gradients_left: bool) -> None:
        """Gradients were stepped or dropped; ``gradients_left`` are those of other optimizers."""
        self._finite = []
        if not gradients_left:
            self._held_scale = None
