"""One unit at run time: a small state machine over its segments."""

from __future__ import annotations

from collections.abc import Container
from enum import Enum

from torch import Tensor, nn

from zeroexp.comm import Pending
from zeroexp.errors import CollectiveTimeout, ModelError
from zeroexp.placement import Tier
from zeroexp.zero.gradient import GradientState, Reduction
from zeroexp.zero.segment import SegmentState


class Life(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class Flow(Enum):
    """Where a unit's gradients are."""

    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    OWNED = "owned"


class Call:
    """One forward call of a unit's module; ``watched`` when its inputs will tell that its backward
    is over."""

    def __init__(self) -> None:
        self.watched = False


class UnitState:
    """Gathers, releases and reduces all segments of one unit together."""

    def __init__(
        self, name: str, module: nn.Module, segments: list[SegmentState], rank: int
    ) -> None:
        self.name = name
        self.module = module
        self.rank = rank
        self.flow = Flow.ACCUMULATING
        self.pins = 0
        """While positive the unit stays whole: somebody outside its own module uses it."""
        self.outstanding = 0
        """Forward calls whose backward has not finished."""
        self.calls: list[Call] = []
        """Forward calls that run now, the innermost last."""
        self.open: set[Call] = set()
        """Calls whose backward runs now."""
        self.stepped = False
        """Whether its step was made in the backward, ahead of the boundary."""
        self._frozen = False
        self._gathers = 0
        self._expected = 0
        self._seen: set[int] = set()
        self._pending: list[Pending] = []
        self._reductions: list[Reduction] = []
        self.set_segments(segments)
        self.life = Life.SHARDED if self._transient else Life.WHOLE

    def set_segments(self, segments: list[SegmentState]) -> None:
        """Replace the segments; their parameters must be released (or replicated)."""
        self.segments = segments
        self._transient = [s for s in segments if s.transient]
        self._trainable = [s for s in segments if s.spec.trainable]

    @property
    def label(self) -> str:
        return self.name or "root"

    @property
    def transient(self) -> bool:
        """Whether this unit has anything to gather: parameters that are whole only while they are
        used."""
        return bool(self._transient)

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient at this moment."""
        return any(p.requires_grad for s in self._trainable for p in s.params)

    @property
    def trainable_segments(self) -> list[SegmentState]:
        return self._trainable

    def _expect(self, *allowed: Enum, of: Enum, action: str) -> None:
        if of not in allowed:
            raise ModelError(
                f"unit {self.label} on rank {self.rank} cannot {action} while it is {of.value}; "
                f"expected {' or '.join(str(a.value) for a in allowed)}"
            )

    def _refuse_stepped(self, what: str) -> None:
        if self.stepped:
            raise ModelError(
                f"unit {self.label} on rank {self.rank} was stepped in backward, as soon as its "
                f"gradients were complete, and {what} before the step of the engine. Set "
                "offload.step_in_backward=false."
            )

    # -- parameters --------------------------------------------------------------------------------

    @property
    def collective(self) -> bool:
        """Whether a gather needs the other ranks."""
        return any(s.cut for s in self._transient)

    @property
    def off_device(self) -> bool:
        """Whether parameters must be brought to the device."""
        return any(s.placement.params.tier is not Tier.DEVICE for s in self._transient)

    @property
    def on_disk(self) -> bool:
        """Whether parameters come from a disk, and take memory until they are back there."""
        return any(s.home_on_disk for s in self._transient)

    def prefetch(self) -> None:
        """A gather will follow soon."""
        if self.life is Life.SHARDED:
            for segment in self._transient:
                segment.prefetch()

    def bring_up(self) -> None:
        """A gather will follow next but one."""
        if self.life is Life.SHARDED:
            for segment in self._transient:
                segment.bring_up()

    def gather(self) -> None:
        """Start to make the parameters whole."""
        self._expect(Life.SHARDED, of=self.life, action="start a gather")
        if self.collective:  # what is whole on every rank is as it was until the boundary
            self._refuse_stepped("its parameters are needed again")
        self._gathers += 1
        self._pending = [s.gather() for s in self._transient]
        self.life = Life.GATHERING

    def offer(self) -> None:
        """Let peers gather this unit before this rank does."""
        if self.life is Life.SHARDED:
            for segment in self._transient:
                segment.offer()

    def wait(self) -> None:
        """Return when the parameters are whole."""
        if self.life is Life.WHOLE:
            return
        self._expect(Life.GATHERING, of=self.life, action="finish a gather")
        try:
            for pending in self._pending:
                pending.wait()
        except CollectiveTimeout as error:
            raise CollectiveTimeout(
                f"{error} On this rank (rank {self.rank}) it is gather {self._gathers} of this "
                "unit."
            ) from error
        self._pending = []
        for segment in self._transient:
            segment.arrived()
            segment.show_whole()
        self.life = Life.WHOLE

    def release(self) -> None:
        """Free the whole parameters; the shards stay."""
        if not self._transient or self.life is Life.SHARDED:
            return
        self.wait()
        for segment in self._transient:
            segment.release()
        self.life = Life.SHARDED

    # -- gradients ---------------------------------------------------------------------------------

    def begin_backward(self, divisor: float, divide_on_arrival: bool) -> None:
        """A backward begins: count its gradients from zero."""
        self._expected = sum(p.requires_grad for s in self._trainable for p in s.params)
        self._seen = set()
        self._frozen = self._expected < sum(len(s.params) for s in self.segments)
        for segment in self._trainable:
            segment.grads.begin_window(divisor, divide_on_arrival)

    def accept(self, grads: GradientState, slot: int, param: Tensor, grad: Tensor) -> None:
        """The gradient of ``param`` arrived."""
        self._refuse_stepped("another gradient arrives for it")
        grads.accept(slot, grad)
        self._seen.add(id(param))

    @property
    def complete(self) -> bool:
        """Whether every parameter that wants a gradient got one in this backward."""
        return len(self._seen) >= self._expected

    @property
    def done_with_gradients(self) -> bool:
        """Whether a complete unit is not read any more in this backward: not while a call of it is
        open, and with frozen weights (which no gradient tells of) only its inputs know."""
        return not (self.outstanding or self.open or self._frozen)

    def reduce(self) -> None:
        """Start to bring the gradients to their owners."""
        self._expect(Flow.ACCUMULATING, Flow.OWNED, of=self.flow, action="start a reduction")
        self._reductions = [s.grads.reduce() for s in self._trainable]
        self.flow = Flow.REDUCING

    @property
    def reduction_over(self) -> bool:
        """Whether :meth:`finish_reduction` would not wait."""
        return all(reduction.over for reduction in self._reductions)

    def finish_reduction(self) -> None:
        self._expect(Flow.REDUCING, of=self.flow, action="finish a reduction")
        for reduction in self._reductions:
            reduction.finish()
        self._reductions = []
        self.flow = Flow.OWNED

    def park_gradients(self) -> None:
        """Nobody needs the reduced gradients before the next reduction or step."""
        for segment in self._trainable:
            segment.grads.park()

    @property
    def pending_window(self) -> bool:
        """Whether gradients of this rank wait for a reduction."""
        return any(s.grads.pending for s in self._trainable)

    def clear_gradients(self, tags: Container[int] | None = None) -> None:
        """Forget the gradients of the segments in ``tags`` (of all)."""
        for segment in self._trainable:
            if tags is None or segment.tag in tags:
                segment.grads.clear()
        if not any(s.grads.has_owned for s in self._trainable):
            self.flow = Flow.ACCUMULATING
