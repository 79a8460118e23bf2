"""The gradients of one segment: where they arrive, and what is left of them on their owner.

* ``local``: gradients of this rank, not yet reduced; permanent where gradients are replicated,
  taken from a pool where they are sharded
* ``owned``: the reduced gradients of this rank's slice
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.comm import Pending
from zeroexp.comm.pool import flat_zeros

if TYPE_CHECKING:
    from zeroexp.zero.segment import SegmentState


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

    def allocate(self) -> None:
        """Make the permanent buffer, as the placement of gradients says."""
        spec, device = self._spec, self._around.device
        if self._around.placement.grads.sharded:
            self._owned = flat_zeros(spec.shard_size, self.dtype, device)
            self._segment.hold("grads", self._owned)
        else:
            self._local = flat_zeros(spec.size, self.dtype, device)
            self._views = self._views_of(self._local)
            self._segment.hold("grads", self._local)

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
                self._segment.hold("grads", self._spare, label="spare")
            self._spare.copy_(self._local[self._lo : self._hi])
            self._owned = self._spare

    def _nothing_waits(self) -> None:
        self.arrived = [False] * len(self.arrived)
        self.num_arrived = 0

    @property
    def pending(self) -> bool:
        """Whether gradients wait in ``local`` for their reduction."""
        return self.num_arrived > 0

    def reduce(self) -> Callable[[], None]:
        """Start the reduction of ``local`` to its owners; the returned function ends it.

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
        out = self._owned if self._owned is not None else local[self._lo : self._hi]
        add = self.has_owned
        group = around.world.reduce
        rows = local.view(group.size, spec.shard_size)
        step = max(1, around.bucket // self.dtype.itemsize // group.size)
        cuts = [(a, min(a + step, spec.shard_size)) for a in range(0, spec.shard_size, step)]
        wire = around.policy.wire_dtype(self._segment.dtype)

        def launch(cut: tuple[int, int]) -> Pending:
            a, b = cut
            return group.reduce_scatter(
                out[a:b],
                [row[a:b] for row in rows],
                tag=self._tag,
                what=f"reduce-scatter of the gradients of unit {spec.unit or 'root'}",
                add=add,
                wire=wire,
            )

        flying = [launch(cut) for cut in cuts[:2]]
        rest = cuts[2:]

        def finish() -> None:
            while flying:
                flying.pop(0).wait()
                if rest:
                    flying.append(launch(rest.pop(0)))
            self.has_owned = True
            self._nothing_waits()
            if self._raw is not None:
                around.pool.give(self._raw)
                self._raw, self._local, self._views = None, None, []

        return finish

    @property
    def owned(self) -> Tensor:
        """Reduced gradients of this rank's slice ``[shard_size]``, still scaled."""
        if self._owned is not None:
            return self._owned
        assert self._local is not None
        return self._local[self._lo : self._hi]

    def spread(self) -> Pending:
        """Where gradients are replicated and stepped by everybody: start to collect the owned
        slices in ``local``."""
        local = self._local
        assert local is not None
        return self._around.world.gather.all_gather(
            local,
            self.owned,
            tag=self._tag,
            what=f"all-gather of the gradients of unit {self._spec.unit or 'root'}",
        )

    @property
    def stepped(self) -> Tensor:
        """What the optimizer sees beside ``master``."""
        if self._around.placement.optim.sharded:
            return self.owned
        assert self._local is not None
        return self._local

    def clear(self) -> None:
        """Forget all gradients: after a step, a skip, or ``zero_grad``."""
        self.has_owned = False
        self.touched = [False] * len(self.touched)
        self._nothing_waits()
        if self._spare is not None:
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
