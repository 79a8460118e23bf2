"""One segment at run time: the tensors behind a flat range of parameters, and where its gradients
are.

``full``    every element, in the dtype that computes; permanent where parameters are replicated
``shard``   this rank's slice of it ``master``  what the optimizer steps: the shard (or all of
``full`` where optimizer state is replicated), or a wider copy ``local``   gradients of this rank,
not yet reduced; permanent where gradients are replicated ``owned``   the reduced gradients of this
rank's slice
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroexp.comm import Pending, World
from zeroexp.comm.pool import BufferPool, flat_zeros
from zeroexp.errors import ModelError
from zeroexp.layout import Segment
from zeroexp.ledger import Ledger
from zeroexp.placement import StatePlacement
from zeroexp.precision import Policy
from zeroexp.zero.buffer import FlatBuffer
from zeroexp.zero.placeholder import Placeholders


@dataclass(frozen=True)
class Surroundings:
    """What every segment of one engine shares."""

    world: World
    ledger: Ledger
    placement: StatePlacement
    policy: Policy
    pool: BufferPool
    device: torch.device
    bucket: int
    """Largest message of one reduction in bytes (``zero.bucket``)."""


class SegmentState:
    """The run-time side of one :class:`zeroexp.layout.Segment`. ``tag`` is its number, the same on
    every rank."""

    def __init__(
        self, spec: Segment, params: Sequence[nn.Parameter], around: Surroundings, tag: int
    ) -> None:
        self.spec = spec
        self.params = list(params)
        self.tag = tag
        self._names = [s.spec.name for s in spec.slots]
        self._around = around
        self._label = f"{tag}"
        self.index = around.world.gather.index
        self.lo, self.hi = spec.bounds(self.index)
        self.dtype = around.policy.storage_dtype(params[0].dtype)
        self.grad_dtype = around.policy.grad_dtype(self.dtype)
        self.sharded = around.placement.params.sharded and self.dtype.is_floating_point
        self.touched = [False] * len(params)
        """Whether a gradient arrived since the last step, per slot."""
        self.arrived = [False] * len(params)
        """Whether a gradient waits in ``local``, per slot."""
        self.num_arrived = 0
        self._divide_on_arrival = True
        self._divisor = 1.0
        self._raw: Tensor | None = None
        self._known: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._local: Tensor | None = None
        self._views: list[Tensor] = []
        self._owned: Tensor | None = None
        self._spare: Tensor | None = None
        self.has_owned = False

    # -- construction ------------------------------------------------------------------------------

    def take_over(self, flat: Tensor) -> None:
        """Build all state from ``flat`` ``[size]``, the whole segment in the dtype the user built;
        point the parameters at it (or at placeholders)."""
        around, spec = self._around, self.spec
        placement = around.placement
        wide = around.policy.master_dtype(self.dtype) if spec.trainable else None
        mine = flat[self.lo : self.hi] if placement.optim.sharded else flat
        master = None
        if wide is not None:
            master = flat_zeros(mine.numel(), wide, around.device)
            master.copy_(mine)
        self.buffer = FlatBuffer(spec.size, self.dtype, around.device)
        self.full = self.buffer.tensor
        self.full.copy_(flat)
        self._whole = [self.full[s.offset : s.stop].view(s.spec.shape) for s in spec.slots]
        if self.sharded:
            self.shard = flat_zeros(spec.shard_size, self.dtype, around.device)
            self.shard.copy_(self.full[self.lo : self.hi])
            self._hold("params", self.shard)
            self._placeholders = Placeholders(
                [s.spec.shape for s in spec.slots], self.dtype, around.device
            )
            self.show_released()
            self.buffer.release()
        else:
            self.shard = self.full[self.lo : self.hi]
            self._hold("params", self.full)
            self.show_whole()
        if master is not None:
            self.master = master
            self._hold("optim", master, label="master")
        else:
            self.master = self.shard if placement.optim.sharded else self.full
        if spec.trainable:
            if placement.grads.sharded:
                self._owned = flat_zeros(spec.shard_size, self.grad_dtype, around.device)
                self._hold("grads", self._owned)
            else:
                self._local = flat_zeros(spec.size, self.grad_dtype, around.device)
                self._views = self._grad_views(self._local)
                self._hold("grads", self._local)

    def _hold(self, kind: str, tensor: Tensor, label: str = "") -> None:
        whole = tensor.numel() == self.spec.size
        pad = self.spec.padding if whole else self.spec.padding_in(self.index)
        tier = getattr(self._around.placement, kind).tier
        self._around.ledger.hold(
            self.spec.unit,
            kind,
            tier,
            tensor.nbytes,
            label=self._label + label,
            padding=pad * tensor.element_size(),
        )

    def hold_optimizer_bytes(self, nbytes: int, padding: int) -> None:
        """Record what the optimizer allocated for this segment."""
        tier = self._around.placement.optim.tier
        self._around.ledger.hold(
            self.spec.unit, "optim", tier, nbytes, label=self._label + "state", padding=padding
        )

    def forget(self) -> None:
        """Strike everything this segment holds from the ledger."""
        for kind, label in (
            ("params", ""),
            ("grads", ""),
            ("grads", "spare"),
            ("optim", "master"),
            ("optim", "state"),
        ):
            tier = getattr(self._around.placement, kind).tier
            self._around.ledger.hold(self.spec.unit, kind, tier, 0, label=self._label + label)

    # -- parameters --------------------------------------------------------------------------------

    def show_whole(self) -> None:
        """Point the parameters at their values. By ``.data``: a parameter must not share its
        version counter with the buffer, or autograd reports a modification at every gather."""
        for param, view in zip(self.params, self._whole, strict=True):
            param.data = view

    def check_views(self) -> None:
        """Raise :class:`ModelError` if the user gave a replicated parameter other memory: what is
        stepped here would never reach the model."""
        if self.sharded:
            return
        for name, param, view in zip(self._names, self.params, self._whole, strict=True):
            if param.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"parameter {name} was given other memory (param.data = ...), so training no "
                    "longer reaches it. Write into it inside zeroexp.gathered(parameter, "
                    "modify_rank=0), with copy_()."
                )

    def show_released(self) -> None:
        self._placeholders.show(self.params)

    def gather(self) -> Pending:
        """Start to fill ``full`` from all shards."""
        self._placeholders.check(self._names)
        self.buffer.acquire()
        self._around.ledger.hold(
            self.spec.unit,
            "whole",
            self._around.placement.params.tier,
            self.buffer.nbytes,
            label=self._label,
        )
        return self._around.world.gather.all_gather(
            self.full,
            self.shard,
            tag=self.tag,
            what=f"all-gather of unit {self.spec.unit or 'root'}",
        )

    def release(self) -> None:
        """Free ``full``; the shards keep the values."""
        self.show_released()
        self.buffer.release()
        self._around.ledger.hold(
            self.spec.unit, "whole", self._around.placement.params.tier, 0, label=self._label
        )

    def write_back(self) -> None:
        """Make what is in ``full`` (edited while whole) the truth: shard and master follow."""
        if self.sharded:
            self.shard.copy_(self.full[self.lo : self.hi])
        self.refresh_master()

    def refresh_master(self) -> None:
        """Take the master copy from the parameters again."""
        if self.has_master_copy:
            source = self.shard if self._around.placement.optim.sharded else self.full
            self.master.copy_(source)

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Set all values from ``flat`` ``[size]``, the same on every rank; the master copy keeps
        its full width."""
        if not self.sharded or self.buffer.held:
            self.full.copy_(flat)
        if self.sharded:
            self.shard.copy_(flat[self.lo : self.hi])
        if self.has_master_copy:
            cut = self._around.placement.optim.sharded
            self.master.copy_(flat[self.lo : self.hi] if cut else flat)

    @property
    def has_master_copy(self) -> bool:
        return self.spec.trainable and self._around.policy.master_dtype(self.dtype) is not None

    @property
    def stepped(self) -> Tensor:
        """The compute-dtype tensor that mirrors ``master``: the shard, or ``full`` where state is
        replicated."""
        return self.shard if self._around.placement.optim.sharded else self.full

    # -- gradients ---------------------------------------------------------------------------------

    def _grad_views(self, local: Tensor) -> list[Tensor]:
        return [local[s.offset : s.stop].view(s.spec.shape) for s in self.spec.slots]

    def begin_window(self, divisor: float, divide_on_arrival: bool) -> None:
        """Gradients that arrive from now on are divided by ``divisor``: one by one, or once before
        the reduction."""
        self._divisor = divisor
        self._divide_on_arrival = divide_on_arrival

    def accept(self, slot: int, grad: Tensor) -> None:
        """Add a gradient that autograd produced to ``local``."""
        if not self.num_arrived:
            self._open_local()
        view = self._views[slot]
        if grad.is_sparse:
            grad = grad.to_dense()
        divisor = self._divisor if self._divide_on_arrival else 1.0
        if self.arrived[slot]:
            view.add_(grad.to(view.dtype) / divisor if divisor != 1.0 else grad)
            return
        if divisor != 1.0 and grad.dtype == view.dtype:
            torch.div(grad, divisor, out=view)
        else:
            view.copy_(grad)
            if divisor != 1.0:
                view.div_(divisor)
        self.arrived[slot] = self.touched[slot] = True
        self.num_arrived += 1

    def _open_local(self) -> None:
        """Make ``local`` ready for a new window: take a buffer, or move what it owns out of the
        way."""
        spec = self.spec
        if self._local is None:
            self._raw = self._around.pool.take(spec.size, self.grad_dtype)
            known = self._known.get(self._raw.data_ptr())
            if known is None:  # the pool gives the same few buffers again and again
                local = self._raw.view(self.grad_dtype)[: spec.size]
                known = self._known[self._raw.data_ptr()] = (local, self._grad_views(local))
            self._local, self._views = known
            for start, stop in spec.gaps:  # padding is summed and stepped like data: zero it
                self._local[start:stop].zero_()
        elif self.has_owned and self._owned is None:
            if self._spare is None:
                self._spare = flat_zeros(spec.shard_size, self.grad_dtype, self._local.device)
                self._hold("grads", self._spare, label="spare")
            self._spare.copy_(self._local[self.lo : self.hi])
            self._owned = self._spare

    def _nothing_waits(self) -> None:
        self.arrived = [False] * len(self.arrived)
        self.num_arrived = 0

    @property
    def pending_window(self) -> bool:
        """Whether gradients wait in ``local`` for their reduction."""
        return self.num_arrived > 0

    def reduce(self) -> Callable[[], None]:
        """Start the reduction of ``local`` to its owners; the returned function ends it.

        A rank on which nothing arrived takes part with zeros.
        """
        around, spec = self._around, self.spec
        if not self.pending_window:
            self._open_local()
        local = self._local
        assert local is not None
        if self.num_arrived < len(self.arrived):
            for view, arrived in zip(self._views, self.arrived, strict=True):
                if not arrived:
                    view.zero_()
        if self._divisor != 1.0 and not self._divide_on_arrival:
            local.div_(self._divisor)
        out = self._owned if self._owned is not None else local[self.lo : self.hi]
        add = self.has_owned
        group = around.world.reduce
        rows = local.view(group.size, spec.shard_size)
        step = max(1, around.bucket // self.grad_dtype.itemsize // group.size)
        cuts = [(a, min(a + step, spec.shard_size)) for a in range(0, spec.shard_size, step)]
        wire = around.policy.wire_dtype(self.dtype)

        def launch(cut: tuple[int, int]) -> Pending:
            a, b = cut
            return group.reduce_scatter(
                out[a:b],
                [row[a:b] for row in rows],
                tag=self.tag,
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
        return self._local[self.lo : self.hi]

    def spread(self) -> Pending:
        """Where gradients are replicated and stepped by everybody: start to collect the owned
        slices in ``local``."""
        local = self._local
        assert local is not None
        return self._around.world.gather.all_gather(
            local,
            self.owned,
            tag=self.tag,
            what=f"all-gather of the gradients of unit {self.spec.unit or 'root'}",
        )

    @property
    def gradient(self) -> Tensor:
        """What the optimizer sees beside ``master``."""
        if self._around.placement.optim.sharded:
            return self.owned
        assert self._local is not None
        return self._local

    def clear_gradients(self) -> None:
        """Forget all gradients: after a step, a skip, or ``zero_grad``."""
        self.has_owned = False
        self.touched = [False] * len(self.touched)
        self._nothing_waits()
        if self._spare is not None:
            self._owned = None
        if self._raw is not None:
            self._around.pool.give(self._raw)
            self._raw, self._local, self._views = None, None, []

    def publish(self) -> Pending:
        """Where parameters are replicated but stepped in slices: start to collect the new values in
        ``full``."""
        return self._around.world.gather.all_gather(
            self.full,
            self.shard,
            tag=self.tag,
            what=f"all-gather of the new parameters of unit {self.spec.unit or 'root'}",
        )
