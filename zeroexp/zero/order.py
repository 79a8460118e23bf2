"""The order in which units are used, learned from the first pass and replayed.

All ranks must issue their collectives in one order. The order of definition serves until every rank
has seen the same other order; a rank that then departs from it is still right: it takes part for
the units it skipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from zeroexp.zero.unit import UnitState


class UseOrder:
    """A permutation of the units with a recorder. ``position`` maps a unit to its place."""

    def __init__(self, units: Iterable[UnitState]) -> None:
        self._set(list(units))
        self._trace: list[UnitState] = []

    def _set(self, units: Sequence[UnitState]) -> None:
        self.units = list(units)
        self.position = {id(u): i for i, u in enumerate(self.units)}

    def start_trace(self) -> None:
        self._trace = []

    def record(self, unit: UnitState) -> None:
        """``unit`` is used now, for the first time in this pass."""
        self._trace.append(unit)

    def digest(self) -> int:
        """A number that is equal on ranks whose last pass went the same way."""
        return zlib.crc32("\n".join(u.name for u in self._trace).encode())

    def adopt(self) -> None:
        """Make the last trace the order; each unit it lacks stays behind the one it followed, so
        that a pass that only skips some changes nothing. Call on all ranks or none, when their
        digests are equal."""
        if not self._trace or self._trace == self.units[: len(self._trace)]:
            return
        used = {id(u) for u in self._trace}
        order = list(self._trace)
        for place, unit in enumerate(self.units):
            if id(unit) not in used:
                order.insert(order.index(self.units[place - 1]) + 1 if place else 0, unit)
        self._set(order)


def backward_order(units: Sequence[UnitState]) -> list[UnitState]:
    """The order in which backward needs ``units`` (given in forward order): the last first, a unit
    that encloses others before those it encloses."""
    done: list[UnitState] = []
    open_: list[UnitState] = []
    for unit in units:
        while open_ and not encloses(open_[-1].name, unit.name):
            done.append(open_.pop())
        open_.append(unit)
    done.extend(reversed(open_))
    return done[::-1]


def encloses(outer: str, inner: str) -> bool:
    """Whether the module of unit ``outer`` contains that of ``inner``."""
    return outer == "" or inner.startswith(outer + ".")
