"""The engine as owner of its units' parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from zeroexp.comm import Group, World
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.residency import Residency
from zeroexp.zero.unit import Life, UnitState


class EngineOwner:
    """See :class:`zeroexp.zero.access.Owner`."""

    def __init__(self, unit: UnitState, model: ShardedModel, residency: Residency) -> None:
        self._unit = unit
        self._model = model
        self._residency = residency
        self._open: list[ExitStack] = []
        self.transferable = False

    @property
    def sharded(self) -> bool:
        return self._unit.transient

    @property
    def world(self) -> World:
        return self._model.around.world

    def holders(self, param: nn.Parameter) -> Group:
        return self._model.place[id(param)][1].sharing.members

    def give_up(self) -> None:
        """Nothing: the optimizer's state, which lies beside the shards, is asked for later."""

    def touch(self) -> None:
        unit = self._unit
        if unit.transient and (unit.life is not Life.WHOLE or not unit.calls):
            self._residency.visit(unit)

    @contextmanager
    def whole(self, *, edit: bool) -> Iterator[None]:
        with self._model.whole_units([self._unit], edit=edit):
            yield

    def open(self, *_: Any) -> None:
        """Before ``state_dict`` of the unit's module: gather once for all its submodules."""
        stack = ExitStack()
        stack.enter_context(self.whole(edit=False))
        self._open.append(stack)

    def shut(self, *_: Any) -> None:
        """After it."""
        if self._open:
            self._open.pop().close()
