"""Who holds what a stage is made of: told by the executor when it is used, and when it is over."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from zeroexp.pipeline.action import Kind

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Owner(Protocol):
    """The calls come in the order of the rank's list.

    ``forward`` and ``backward`` bracket one action of one stage. In ``backward`` the kind is
    BACKWARD, BACKWARD_INPUT (autograd reaches no parameter) or BACKWARD_WEIGHT (it reaches each
    parameter once); ``last`` says that no gradient of the stage follows in this run. With a stage's
    recompute, BACKWARD or BACKWARD_INPUT run its forward as well.
    """

    def unshard(self, stage: int) -> None:
        """The stage is used from here on."""

    def reshard(self, stage: int) -> None:
        """The stage is not used until the next :meth:`unshard`."""

    def reduce_grads(self, stage: int) -> None:
        """The stage's gradients are complete."""

    def forward(self, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        """Around a stage's forward."""

    def backward(
        self, stage: int, micro_batch: int, kind: Kind, last: bool
    ) -> AbstractContextManager[Any]:
        """Around a backward, or a half of one."""

    def failed(self) -> None:
        """The run ends with an error: forget what is half done."""


class Nobody:
    """The owner of parameters and gradients that simply are there."""

    def unshard(self, stage: int) -> None:
        pass

    def reshard(self, stage: int) -> None:
        pass

    def reduce_grads(self, stage: int) -> None:
        pass

    def forward(self, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        return _NOTHING

    def backward(
        self, stage: int, micro_batch: int, kind: Kind, last: bool
    ) -> AbstractContextManager[Any]:
        return _NOTHING

    def failed(self) -> None:
        pass
