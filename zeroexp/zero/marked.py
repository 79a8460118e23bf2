"""Units that are gathered and released where a pipeline's list says so.

A rank of a pipeline runs forwards and backwards of many micro-batches in an order that only its
list knows, so nothing can be learned from one pass for the next. The list's marks say when a stage
is used from and until when; passes find its units whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.zero.residency import Direction, Residency
from zeroexp.zero.unit import Life, UnitState


class MarkedResidency(Residency):
    """See :class:`Residency`. All data-parallel ranks of a stage run the same list, so their
    gathers match though none takes part in what it skips."""

    def unshard(self, units: Sequence[UnitState]) -> None:
        """``units`` are used from here on: start to gather them. May be called again for units that
        two stages share; each call needs its :meth:`reshard`."""
        for unit in units:
            if unit.transient:
                unit.pins += 1
                if unit.life is Life.SHARDED:
                    unit.gather()

    def reshard(self, units: Sequence[UnitState]) -> None:
        """They are not used until the next :meth:`unshard`."""
        for unit in units:
            if unit.transient:
                unit.pins -= 1
                if unit.pins == 0:
                    unit.release()
        self._around.spare.drop()

    def begin_pass(self, direction: Direction) -> None:
        self._direction = direction
        self._used = set()
        if direction is Direction.FORWARD:
            self.calls += 1

    def end_pass(self, failed: bool = False) -> None:
        if self._direction is Direction.BACKWARD:
            for unit in self._units:
                unit.outstanding = 0
                unit.open.clear()
        self._direction = None

    def need_root(self) -> None:
        """Nothing: the root's own parameters are marked with the stage that uses them."""

    def need(self, unit: UnitState) -> None:
        if not unit.transient:
            return
        self._used.add(id(unit))
        self._gather_now(unit)

    def leave(self, unit: UnitState) -> None:
        """Nothing: see :meth:`reshard`."""

    def retire(self, unit: UnitState) -> None:
        """Nothing: see :meth:`reshard`."""

    def offer_rest(self, waits_for: UnitState) -> None:
        """Nothing: what is gathered was sent at its mark."""
