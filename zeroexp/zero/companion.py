"""What modules bring along that the engine which trains them must call, without knowing them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

from torch import Tensor, nn

from zeroexp.comm import Group, World

OFFER = "zeroexp_companion"
"""A static method of a module class that makes one :class:`Companion` for a whole model."""


class Forward(Enum):
    """What a forward of a part of a model is, for modules that leave something behind in it."""

    WHOLE = auto()
    """The usual one: a backward through its graph follows, or none in an evaluation."""
    FIRST = auto()
    """Without a graph, in training; the same comes again."""
    AGAIN = auto()
    """The same once more, with a graph: it counts for nothing but its gradients."""
    TRIAL = auto()
    """To see what it costs: it counts for nothing."""


class Section(Protocol):
    """The modules of one kind in a part of a model."""

    @property
    def makes_losses(self) -> bool:
        """Whether their forward makes losses that the model's loss function asks them for."""
        ...

    def forward(self, kind: Forward) -> AbstractContextManager[None]:
        """Around a forward of the part."""
        ...

    def take_losses(self) -> Tensor | None:
        """The sum of the losses that were made since the last call, a scalar."""
        ...

    def give_losses(self, total: Tensor) -> None:
        """Have the loss function find ``total`` among their losses."""
        ...


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

    def section(self, modules: Iterable[nn.Module]) -> Section | None:
        """Those in ``modules``, which are parts of the model; None where there are none."""
        ...


def companions(model: nn.Module) -> list[Companion]:
    """One for each kind of module in ``model`` that offers one."""
    makers = dict.fromkeys(
        getattr(type(m), OFFER) for m in model.modules() if hasattr(type(m), OFFER)
    )
    return [make(model) for make in makers]
