"""Which units are whole, and when: gathers on demand and ahead of demand, releases after use.

A *pass* is one traversal of the model, forward or backward. Within a pass every rank gathers every
unit once, in one order, so that the collectives match although ranks may skip different modules:
who skips a unit takes part in its gather and drops it. A unit that is needed again in the same pass
(used twice, recomputed after its release) is gathered once more, which all ranks then must do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

import torch

from zeroexp.zero.order import UseOrder, backward_order
from zeroexp.zero.surroundings import Surroundings
from zeroexp.zero.unit import Life, UnitState

_FROM_DISK, _TO_DEVICE = 3, 2
"""Units ahead of the one in use whose shards come from disk, and go from the host to the device
(Rajbhandari et al., arXiv:2104.07857, section 6.2: disk for i+3, device for i+2, all-gather for
i+1)."""

_PATIENCE = 0.05
"""Seconds to wait for a reduction before a further shard is brought from disk to be offered."""


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Residency:
    """Gathers and releases the units of one engine.

    ``keeps`` says whether a unit stays whole between its forward and its backward
    (``zero.reshard_after_forward``); ``root`` is the unit of what lies outside all others.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        around: Surroundings,
        *,
        prefetch: int,
        keeps: Callable[[UnitState], bool],
        root: UnitState | None = None,
    ) -> None:
        sharded = [u for u in units if u.transient]
        self.orders = {
            Direction.FORWARD: UseOrder(sharded),
            Direction.BACKWARD: UseOrder(backward_order(sharded)),
        }
        self._units = sharded
        self._around = around
        self._prefetch = prefetch
        self._far = any(u.off_device for u in sharded)
        self._keeps = keeps
        self._root = root
        self._direction: Direction | None = None
        self._issued: set[int] = set()
        self._ahead: list[UnitState] = []
        self._used: set[int] = set()
        self._passed = 0  # all units before this place in the order have been gathered
        self._visitors: list[UnitState] = []
        self._visited: set[int] = set()
        self._held: list[UnitState] = []
        self._depth = 0
        self.calls = 0
        """Forward passes so far; part of the message when ranks lose each other."""

    @property
    def active(self) -> bool:
        """Whether a pass may gather at any moment (inside a scope or a backward)."""
        return self._depth > 0 or self._direction is not None

    @property
    def gathers(self) -> bool:
        """Whether there is any sharded unit."""
        return bool(self._units)

    @property
    def direction(self) -> Direction | None:
        return self._direction

    # -- passes ------------------------------------------------------------------------------------

    def enter_scope(self) -> None:
        """Code that uses the model begins; scopes nest."""
        self._depth += 1

    def exit_scope(self, failed: bool = False) -> None:
        """The outermost scope ends the forward pass. After an exception the ranks no longer agree,
        so nothing more is gathered."""
        self._depth -= 1
        if self._depth == 0 and self._direction is Direction.FORWARD:
            self.end_pass(failed)

    def begin_pass(self, direction: Direction) -> None:
        if self._direction is not None:
            self.end_pass()
        self._direction = direction
        self._issued = {id(u) for u in self._units if u.life is not Life.SHARDED}
        self._used = set()
        self._passed = 0
        self._ahead = []
        self.orders[direction].start_trace()
        if direction is Direction.FORWARD:
            self.calls += 1
            return
        visited = [u for u in self._units if id(u) in self._visited]
        for unit in visited:  # no hook of their own will gather them
            self._gather_now(unit)
        self._visitors += [u for u in visited if u not in self._visitors]

    def end_pass(self, failed: bool = False) -> None:
        """Take part in what this rank did not need, and release what need not stay."""
        direction, self._direction = self._direction, None
        if direction is None or not self._units:
            return
        if not failed:
            for unit in self.orders[direction].units:
                if id(unit) not in self._issued and unit.collective:
                    unit.gather()
                    unit.release()
        keeping = direction is Direction.FORWARD and torch.is_grad_enabled() and not failed
        for unit in self._units:
            stays = keeping and (self._keeps(unit) or unit in self._visitors)
            # After a failure a gather may be in flight whose peer is gone: waiting would hide the
            # first error.
            stays = stays or (failed and unit.life is Life.GATHERING)
            if not stays and unit.pins == 0:
                unit.release()
            if direction is Direction.BACKWARD:
                unit.outstanding = 0
                unit.open.clear()
        self._visitors = self._visitors if keeping else []
        self._around.spare.drop()
        if direction is Direction.FORWARD and not failed:
            self.settle()

    def settle(self) -> None:
        """Wait until the peers have this rank's shards. Not before the reductions of a backward are
        over, since a peer may wait for those first."""
        self._around.world.settle()

    # -- units -------------------------------------------------------------------------------------

    def need(self, unit: UnitState) -> None:
        """Return when ``unit`` is whole, and start to gather those that follow."""
        if not unit.transient:
            return
        if self._direction is None:
            if self._depth == 0:  # a module called on its own, outside any scope
                self._gather_now(unit)
                return
            self.begin_pass(Direction.FORWARD)
        assert self._direction is not None
        order = self.orders[self._direction]
        at = order.position[id(unit)]
        if id(unit) not in self._used:
            self._used.add(id(unit))
            order.record(unit)
            self._catch_up(order, at)
        self._gather_now(unit)
        self._look_ahead(order, at)

    def need_root(self) -> None:
        """Code that may read any parameter outside of the other units begins."""
        if self._root is not None:
            self.need(self._root)

    def was_needed(self, unit: UnitState) -> bool:
        """Whether the running pass has asked for ``unit``."""
        return id(unit) in self._used

    def _gather_now(self, unit: UnitState) -> None:
        if unit.life is Life.SHARDED:
            unit.gather()
        self._issued.add(id(unit))
        unit.wait()

    def _catch_up(self, order: UseOrder, at: int) -> None:
        """Gather with the others what this rank skips on its way to position ``at``, and drop
        it."""
        passed, self._passed = self._passed, max(at, self._passed)
        skipped = [u for u in order.units[passed:at] if id(u) not in self._issued]
        for unit in skipped:
            self._issued.add(id(unit))
            if unit.collective:
                unit.gather()
                unit.release()
        if self._ahead:
            unused = [
                u for u in self._ahead if order.position[id(u)] < at and id(u) not in self._used
            ]
            for unit in unused:
                unit.release()
            self._ahead = [u for u in self._ahead if id(u) not in self._used and u not in unused]

    def _look_ahead(self, order: UseOrder, at: int) -> None:
        for unit in order.units[at + 1 : at + 1 + self._prefetch]:
            if id(unit) not in self._issued:
                unit.gather()
                self._issued.add(id(unit))
                self._ahead.append(unit)
        if self._prefetch and self._far:
            for unit in order.units[at + 1 : at + 1 + _FROM_DISK]:
                if id(unit) not in self._issued:
                    unit.prefetch()
            for unit in order.units[at + 1 : at + 1 + _TO_DEVICE]:
                if id(unit) not in self._issued:
                    unit.bring_up()

    def offer_rest(self, waits_for: UnitState) -> None:
        """This rank is about to wait inside a backward for a reduction. A peer that has no gradient
        for it, because it skipped the unit, takes part only when its own backward is over: it must
        be able to gather what it still needs, or the two wait for each other for ever."""
        if self._direction is not Direction.BACKWARD:
            return
        for unit in self.orders[Direction.BACKWARD].units:
            if id(unit) in self._issued:
                continue
            if unit.on_disk:  # one by one, and only while it takes long: all would fill the memory
                until = time.monotonic() + _PATIENCE
                while not waits_for.reduction_over and time.monotonic() < until:
                    time.sleep(_PATIENCE / 50)
                if waits_for.reduction_over:
                    return
            unit.offer()

    def visit(self, unit: UnitState) -> None:
        """A parameter is read. Outside its unit's own module the unit stays whole until the
        backward is over, and is whole in every other backward before the next step."""
        if not self.active:
            return
        outside = not unit.calls and self._direction is not Direction.BACKWARD
        if outside and torch.is_grad_enabled():
            self._visited.add(id(unit))
        if unit.life is not Life.WHOLE:
            self.need(unit)
            self._visitors.append(unit)

    def hold(self, unit: UnitState) -> None:
        """Keep ``unit`` whole until the next step: a graph was made of its backward."""
        if unit.pins == 0:
            unit.pins += 1
            self._held.append(unit)

    def leave(self, unit: UnitState) -> None:
        """The forward of ``unit``'s module is over."""
        if self._direction is Direction.BACKWARD or unit.pins or unit in self._visitors:
            return  # recomputation: its backward follows at once
        if self._direction is None or not (torch.is_grad_enabled() and self._keeps(unit)):
            unit.release()

    def retire(self, unit: UnitState) -> None:
        """The backward of ``unit``'s module is over."""
        if unit.pins == 0 and unit not in self._visitors:
            unit.release()

    def release_all(self) -> None:
        """Release every unit that nobody pins: after a step, the gathered values are old."""
        self._direction = None
        self._visitors = []
        self._visited = set()
        for unit in self._held:
            unit.pins -= 1
        self._held = []
        for unit in self._units:
            if unit.pins == 0:
                unit.release()
        self._around.spare.drop()
