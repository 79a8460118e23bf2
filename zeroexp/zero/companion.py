"""What modules bring along that the engine which trains them must call, without knowing them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
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
    def num_losses(self) -> int:
        """How many of them make a loss in their forward, which the model's loss function asks them
        for."""
        ...

    @property
    def meets_others(self) -> bool:
        """Whether their forward needs other data-parallel ranks, which run it as often."""
        ...

    @property
    def draws_apart(self) -> bool:
        """Whether their forward draws from generators that are not torch's default ones."""
        ...

    def forward(self, kind: Forward) -> AbstractContextManager[None]:
        """Around a forward of the part."""
        ...

    def take_losses(self) -> Tensor | None:
        """Of each of ``num_losses`` what it made since the last call, as a vector; None where no
        one made any."""
        ...

    def give_losses(self, losses: Tensor) -> None:
        """Have the loss function find such a vector as theirs."""
        ...

    def forget(self) -> None:
        """What was made of a batch that failed counts for nothing."""
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

    def after_step(self, *groups: Group) -> None:
        """A step was applied. The ranks of one group after the other call this together: those that
        have the same part of the model, and those that have the others."""
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


def sections(found: Iterable[Companion], modules: Sequence[nn.Module]) -> list[Section]:
    """What the companions ``found`` have in ``modules``."""
    each = (companion.section(modules) for companion in found)
    return [section for section in each if section is not None]
