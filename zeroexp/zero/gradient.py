"""The gradients of one segment: where they arrive, and what is left of them on their owner.

* ``local``: gradients of this rank, not yet reduced; permanent where gradients are replicated,
  taken from a pool where they are sharded
* ``owned``: the reduced gradients of this rank's slice, in memory or on disk
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.comm import Pending
from zeroexp.comm.pool import flat_zeros
from zeroexp.placement import Tier
from zeroexp.tiers import Crossing

if TYPE_CHECKING:
    from zeroexp.zero.home import DiskHome
    from zeroexp.zero.segment import SegmentState


class Reduction:
    """A reduction in flight, in pieces of ``zero.bucket``: two at a time."""

    def __init__(self, launches: Sequence[Callable[[], Pending]], then: Callable[[], None]) -> None:
        self._rest = list(launches)
        self._then = then
        self._flying = [launch() for launch in self._take(2)]

    def _take(self, count: int) -> list[Callable[[], Pending]]:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    @property
    def over(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return not self._rest and all(pending.over for pending in self._flying)

    def finish(self) -> None:
        while self._flying:
            self._flying.pop(0).wait()
            self._flying += [launch() for launch in self._take(1)]
        self._then()


class GradientState:
    """Gathers what autograd produces for a segment and brings it to its owners."""

    def __init__(self, segment: SegmentState) -> None:
        self._segment = segment
        self._spec, self._tag, self._around = segment.spec, segment.tag, segment.around
        self._lo, self._hi = segment.lo, segment.hi
        self.dtype = segment.around.policy.grad_dtype(segment.dtype)
        slots = len(segment.params)
        self.touched = [False] * slots
        """Whether a gradient arrived since the last step, per slot."""
        self.arrived = [False] * slots
        """Whether a gradient waits in ``local``, per slot."""
        self.num_arrived = 0
        self.has_owned = False
        """Whether ``owned`` holds anything."""
        self._divide_on_arrival = True
        self._divisor = 1.0
        self._quotient: Tensor | None = None
        self._raw: Tensor | None = None
        self._known: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._local: Tensor | None = None
        self._views: list[Tensor] = []
        self._owned: Tensor | None = None
        self._spare: Tensor | None = None
        self._disk: DiskHome | None = None
        self._squares: float | None = None
        self._crossing: Crossing | None = None
        self._adds = False

    def allocate(self) -> None:
        """Make the permanent buffer, as the placement of gradients says."""
        segment, spec, device = self._segment, self._spec, self._around.device
        if segment.on_disk is not None and segment.on_disk.grads is not None:
            self._disk = segment.on_disk.grads
            segment.hold("grads", spec.shard_size * self.dtype.itemsize)
        elif segment.placement.grads.sharded:
            tier = segment.placement.grads.tier
            self._owned = segment.zeros(spec.shard_size, self.dtype, tier)
            segment.hold("grads", self._owned.nbytes)
        else:
            self._local = flat_zeros(spec.size, self.dtype, device)
            self._views = self._views_of(self._local)
            segment.hold("grads", self._local.nbytes)

    def _views_of(self, local: Tensor) -> list[Tensor]:
        return [local[s.offset : s.stop].view(s.spec.shape) for s in self._spec.slots]

    def begin_window(self, divisor: float, divide_on_arrival: bool) -> None:
        """Gradients that arrive from now on are divided by ``divisor``: one by one, or once before
        the reduction."""
        if (divisor, divide_on_arrival) == (self._divisor, self._divide_on_arrival):
            return  # as in the backward before
        self._divisor = divisor
        self._divide_on_arrival = divide_on_arrival
        # As a tensor: torch takes twice as long to divide by a Python number.
        self._quotient = (
            torch.tensor(divisor, dtype=self.dtype) if divide_on_arrival and divisor != 1 else None
        )

    def accept(self, slot: int, grad: Tensor) -> None:
        """Add a gradient that autograd produced to ``local``."""
        if not self.num_arrived:
            self._open_local()
        view = self._views[slot]
        if grad.is_sparse:
            grad = grad.to_dense()
        divisor, again = self._quotient, self.arrived[slot]
        if divisor is not None and not again and grad.dtype == view.dtype:
            torch.div(grad, divisor, out=view)
        elif divisor is not None and _one_pass(view, grad):
            ops.divide_into(view, grad, self._divisor, add=again)
        elif again:
            view.add_(grad.to(view.dtype) / divisor if divisor is not None else grad)
        elif divisor is None:
            view.copy_(grad)
        else:
            view.copy_(grad).div_(divisor)
        if not again:
            self.arrived[slot] = self.touched[slot] = True
            self.num_arrived += 1

    def _open_local(self) -> None:
        """Make ``local`` ready for a new window: take a buffer, or move what it owns out of the
        way."""
        spec = self._spec
        if self._local is None:
            self._raw = self._around.pool.take(spec.size, self.dtype)
            known = self._known.get(self._raw.data_ptr())
            if known is None:  # the pool gives the same few buffers again and again
                local = self._raw.view(self.dtype)[: spec.size]
                known = self._known[self._raw.data_ptr()] = (local, self._views_of(local))
            self._local, self._views = known
            for start, stop in spec.gaps:  # padding is summed and stepped like data: zero it
                self._local[start:stop].zero_()
        elif self.has_owned and self._owned is None:
            if self._spare is None:
                self._spare = flat_zeros(spec.shard_size, self.dtype, self._local.device)
                self._segment.hold("grads", self._spare.nbytes, label="spare", sharded=True)
            self._spare.copy_(self._local[self._lo : self._hi])
            self._owned = self._spare

    def _nothing_waits(self) -> None:
        self.arrived = [False] * len(self.arrived)
        self.num_arrived = 0

    @property
    def pending(self) -> bool:
        """Whether gradients wait in ``local`` for their reduction."""
        return self.num_arrived > 0

    def reduce(self) -> Reduction:
        """Start the reduction of ``local`` to its owners.

        A rank on which nothing arrived takes part with zeros.
        """
        around, spec = self._around, self._spec
        if not self.pending:
            self._open_local()
        local = self._local
        assert local is not None
        if self.num_arrived < len(self.arrived):
            for view, arrived in zip(self._views, self.arrived, strict=True):
                if not arrived:
                    view.zero_()
        if self._divisor != 1.0 and not self._divide_on_arrival:
            local.div_(self._divisor)
        self._land()
        add = self.has_owned
        if self._disk is not None and self._owned is None:
            self._owned = self._disk.fetch() if add else self._disk.take()
        out = self._owned if self._owned is not None else local[self._lo : self._hi]
        crosses = out.device != local.device  # reduced on the device, owned on the host
        sum_here = torch.empty_like(out, device=local.device) if crosses else out
        group = self._segment.sharing.reduce
        rows = local.view(group.size, spec.shard_size)
        step = max(1, around.bucket // self.dtype.itemsize // group.size)
        cuts = [(a, min(a + step, spec.shard_size)) for a in range(0, spec.shard_size, step)]
        wire = around.policy.wire_dtype(self._segment.dtype)

        def launch(cut: tuple[int, int]) -> Pending:
            a, b = cut
            return group.reduce_scatter(
                sum_here[a:b],
                [row[a:b] for row in rows],
                tag=self._tag,
                what=f"reduce-scatter of the gradients of unit {spec.unit or 'root'}",
                add=add and not crosses,
                wire=wire,
            )

        def finish() -> None:
            self.has_owned, self._squares = True, None
            if crosses:
                self._adds = add
                self._crossing = around.border.down(sum_here, None if add else out)
            if self._segment.placement.grads.tier is not Tier.DEVICE:
                around.ledger.moved("down", out.nbytes)
            self._nothing_waits()
            if self._raw is not None:
                around.pool.give(self._raw)
                self._raw, self._local, self._views = None, None, []

        return Reduction([partial(launch, cut) for cut in cuts], finish)

    def _land(self) -> None:
        """What the last reduction made on the device is on the host when this returns."""
        if self._crossing is not None:
            crossing, self._crossing = self._crossing, None
            arrived = crossing.wait()
            if self._adds:
                assert self._owned is not None
                self._owned.add_(arrived)

    def park(self) -> None:
        """Nobody needs ``owned`` for now: to disk with it, where that is its place."""
        if self._disk is not None and self._owned is not None:
            self.sum_squares()
            self._disk.keep()
            self._owned = None

    @contextmanager
    def at_hand(self, *, edits: bool = False) -> Iterator[Tensor]:
        """:attr:`owned` in memory, wherever it is between uses; ``edits``: changes are kept."""
        self._land()
        parked = self._disk is not None and self._owned is None
        if parked:
            assert self._disk is not None
            self._owned = self._disk.fetch()
        if edits:
            self._squares = None
        try:
            yield self.owned
        finally:
            if parked and edits:
                self.park()
            elif parked:
                assert self._disk is not None
                self._disk.put_back()
                self._owned = None

    def discard(self) -> None:
        """``owned`` was stepped ahead of the boundary: what must be known of it there is kept."""
        if self._disk is not None:
            self.sum_squares()
            self._disk.put_back()
            self._owned = None

    @property
    def finite(self) -> bool:
        """Whether all elements of ``owned`` are."""
        return math.isfinite(self.sum_squares())

    def sum_squares(self) -> float:
        """Sum of squares of ``owned`` in fp64; not finite when any element is not."""
        if self._squares is None:
            with self.at_hand() as owned:
                self._squares = _sum_squares(owned)
        return self._squares

    @property
    def owned(self) -> Tensor:
        """Reduced gradients of this rank's slice ``[shard_size]``, still scaled; in memory, see
        :meth:`at_hand`."""
        self._land()
        if self._owned is not None:
            return self._owned
        assert self._local is not None
        return self._local[self._lo : self._hi]

    def spread(self) -> Pending:
        """Where gradients are replicated and stepped by everybody: start to collect the owned
        slices in ``local``."""
        local = self._local
        assert local is not None
        return self._segment.sharing.gather.all_gather(
            local,
            self.owned,
            tag=self._tag,
            what=f"all-gather of the gradients of unit {self._spec.unit or 'root'}",
        )

    @contextmanager
    def stepped(self) -> Iterator[Tensor]:
        """What the optimizer sees beside ``master``."""
        if not self._segment.placement.optim.sharded:
            assert self._local is not None
            yield self._beside_master(self._local)
            return
        with self.at_hand() as owned:
            yield self._beside_master(owned)

    def beside_master(self) -> Tensor:
        """:attr:`owned` where the optimizer works; a copy, if that is not where it is."""
        return self._beside_master(self.owned)

    def _beside_master(self, gradient: Tensor) -> Tensor:
        leaves = self._segment.placement.optim.tier is not Tier.DEVICE
        if leaves and gradient.device == self._around.device:
            return self._around.border.down(gradient).wait()
        return gradient

    @property
    def memory(self) -> list[Tensor]:
        """Everything it holds between two calls, and nothing that is on disk."""
        self._land()
        owned = None if self._disk is not None else self._owned
        return [t for t in (self._local, owned, self._spare) if t is not None]

    @property
    def holds_any(self) -> bool:
        """Whether there is a gradient in :attr:`memory`; padding beside it is zero."""
        return self.pending or self.has_owned

    def forget_buffers(self) -> None:
        """The pool drops its buffers: let go of those that were known from before."""
        self._known = {}

    def clear(self) -> None:
        """Forget all gradients: after a step, a skip, or ``zero_grad``."""
        self._land()
        self.has_owned, self._squares = False, None
        self.touched = [False] * len(self.touched)
        self._nothing_waits()
        if self._disk is not None:
            self._disk.put_back()
        if self._spare is not None or self._disk is not None:
            self._owned = None
        if self._raw is not None:
            self._around.pool.give(self._raw)
            self._raw, self._local, self._views = None, None, []


def _one_pass(view: Tensor, grad: Tensor) -> bool:
    """Whether one kernel widens, divides and adds ``grad`` to ``view``, without temporaries."""
    return (
        grad.device.type == "cpu"
        and view.dtype == torch.float32
        and grad.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and grad.is_contiguous()
    )


def _sum_squares(t: Tensor) -> float:
    if t.device.type == "cpu":
        return ops.sum_squares(t)
    return float(torch.linalg.vector_norm(t, dtype=torch.float64).square())
