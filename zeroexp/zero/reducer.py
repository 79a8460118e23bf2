"""Brings gradients to their owners while the backward that produces them goes on.

Reductions start in one fixed order of units on every rank. A unit whose turn has not come waits;
what is left is reduced at the end of backward. At most two reductions are in flight (one, and
waited for at once, without ``zero.overlap``), which bounds the memory they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroexp.zero.order import UseOrder
from zeroexp.zero.unit import UnitState

IN_FLIGHT = 2
"""Units in reduction at a time."""


class Reducer:
    """The gradient side of one engine. ``before_wait`` is called before this rank waits inside a
    backward, with the unit whose reduction it waits for, ``after`` when it is over, unless its
    gradients are dropped."""

    def __init__(
        self,
        units: Sequence[UnitState],
        *,
        overlap: bool,
        before_wait: Callable[[UnitState], None],
        after: Callable[[UnitState], None],
    ) -> None:
        self.set_units(units)
        self._after = after
        self._before_wait = before_wait
        self._overlap = overlap
        self._ready: set[int] = set()
        self._turn = 0
        self._queue: list[UnitState] = []
        self._flying: list[UnitState] = []
        self.reducing = False
        """Whether gradients of the running backward are reduced in it."""

    def set_units(self, units: Sequence[UnitState]) -> None:
        """The units that have gradients, in the order in which a backward completes them."""
        self.order = UseOrder(units)
        self.units = list(units)
        """Units with gradients, in the order in which a plain backward completes them."""

    def following(self, unit: UnitState) -> UnitState | None:
        """The unit whose turn it is after ``unit``."""
        at = self.order.position[id(unit)] + 1
        return self.order.units[at] if at < len(self.order.units) else None

    def begin(
        self,
        *,
        reduce: bool,
        divisor: float,
        divide_on_arrival: bool,
        units: Sequence[UnitState] | None = None,
    ) -> None:
        """A backward begins, which reaches no others than ``units`` (None: it may reach all)."""
        if self._flying:
            self.abandon()
        self.reducing = reduce
        self._ready = set()
        self._turn = 0
        reached = None if units is None else {id(u) for u in units}
        self._queue = [
            u for u in self.order.units if u.trains and (reached is None or id(u) in reached)
        ]
        self.order.start_trace()
        for unit in self.units:
            unit.begin_backward(divisor, divide_on_arrival)

    def ready(self, unit: UnitState) -> None:
        """All gradients of ``unit`` have arrived, or none will on this rank."""
        if id(unit) in self._ready:
            return
        self._ready.add(id(unit))
        self.order.record(unit)
        if self.reducing:
            self._advance()

    def _advance(self) -> None:
        while self._flying and self._flying[0].reduction_over:
            self._finish_first()  # what is done with can be stepped, and its buffers used again
        while self._turn < len(self._queue) and id(self._queue[self._turn]) in self._ready:
            self._launch(self._queue[self._turn])
            self._turn += 1

    def _launch(self, unit: UnitState) -> None:
        while len(self._flying) >= IN_FLIGHT:
            self._finish_first()
        unit.reduce()
        self._flying.append(unit)
        if not self._overlap:
            self.drain()

    def end(self) -> None:
        """The backward is over: reduce what is left and wait for all of it."""
        if self.reducing:
            for unit in self._queue[self._turn :]:
                self._launch(unit)
            self._turn = len(self._queue)
        self.drain()
        self.reducing = False

    def settle(self, unit: UnitState) -> None:
        """Finish the reduction of ``unit`` if one is in flight: another gradient arrives for it."""
        while unit in self._flying:
            self._finish_first()

    def drain(self) -> None:
        while self._flying:
            self._finish_first()

    def _finish_first(self, *, kept: bool = True) -> None:
        unit = self._flying.pop(0)
        self._before_wait(unit)
        unit.finish_reduction()
        if kept:
            self._after(unit)
        if not unit.stepped:
            unit.park_gradients()

    def flush(self, units: Sequence[UnitState]) -> None:
        """Reduce ``units`` now, in the fixed order; the same units on every rank."""
        wanted = {id(u) for u in units}
        for unit in self.order.units:
            if id(unit) in wanted:
                self._launch(unit)
        self.drain()

    def abandon(self) -> None:
        """After a backward that raised: finish what is in flight, drop all gradients.

        Not called when it raises, since a peer may be gone and the first error must not wait for
        it; the next backward or ``zero_grad`` does.
        """
        self.reducing = False
        while self._flying:
            self._finish_first(kept=False)
        for unit in self.units:
            unit.clear_gradients()

    @property
    def interrupted(self) -> bool:
        """Whether a backward ended with reductions in flight."""
        return bool(self._flying)
