"""What modules bring along that the engine which trains them must call, without knowing them."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from torch import nn

from zeroexp.comm import Group, World

OFFER = "zeroexp_companion"
"""A static method of a module class that makes one :class:`Companion` for a whole model."""


class Companion(Protocol):
    """The part of a training loop that belongs to one kind of module."""

    def join(self, world: World) -> None:
        """An engine over ``world`` takes the model; before anything of it is sent. Collective."""
        ...

    def warnings(self, stepped: Container[int]) -> list[str]:
        """What the user should know before training; ``stepped`` has the ``id`` of every parameter
        that an optimizer holds."""
        ...

    def after_step(self, everyone: Group) -> None:
        """A step was applied; ``everyone`` are all data-parallel ranks, which call this
        together."""
        ...


def companions(model: nn.Module) -> list[Companion]:
    """One for each kind of module in ``model`` that offers one."""
    makers = dict.fromkeys(
        getattr(type(m), OFFER) for m in model.modules() if hasattr(type(m), OFFER)
    )
    return [make(model) for make in makers]
