"""One segment at run time: the tensors behind a flat range of parameters.

* ``full``: every element, in the dtype that computes; permanent where parameters are replicated
* ``shard``: this rank's slice of it
* ``master``: what the optimizer steps: the shard (or all of ``full`` where optimizer state is
  replicated), or a wider copy
* ``grads``: see :class:`zeroexp.zero.gradient.GradientState`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroexp import ops
from zeroexp.comm import Pending, World
from zeroexp.comm.pool import BufferPool, flat_zeros
from zeroexp.errors import ModelError
from zeroexp.layout import Segment
from zeroexp.ledger import Ledger
from zeroexp.ops.edits import adopt_edits_in_torch
from zeroexp.placement import StatePlacement
from zeroexp.precision import Policy
from zeroexp.zero.buffer import FlatBuffer, SparePages
from zeroexp.zero.gradient import GradientState
from zeroexp.zero.placeholder import Placeholders


@dataclass(frozen=True)
class Surroundings:
    """What every segment of one engine shares."""

    world: World
    ledger: Ledger
    placement: StatePlacement
    policy: Policy
    pool: BufferPool
    spare: SparePages
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
        self.around = around
        self._label = f"{tag}"
        self.index = around.world.gather.index
        self.lo, self.hi = spec.bounds(self.index)
        self.dtype = around.policy.storage_dtype(params[0].dtype)
        self.sharded = around.placement.params.sharded and self.dtype.is_floating_point
        self.grads = GradientState(self)
        """Its gradients; empty unless it is trainable."""

    # -- construction ------------------------------------------------------------------------------

    def take_over(self, flat: Tensor) -> None:
        """Build all state from ``flat`` ``[size]``, the whole segment in the dtype the user built;
        point the parameters at it (or at placeholders)."""
        around, spec = self.around, self.spec
        placement = around.placement
        wide = around.policy.master_dtype(self.dtype) if spec.trainable else None
        mine = flat[self.lo : self.hi] if placement.optim.sharded else flat
        master = None
        if wide is not None:
            master = flat_zeros(mine.numel(), wide, around.device)
            master.copy_(mine)
        self.buffer = FlatBuffer(spec.size, self.dtype, around.device, around.spare)
        self.full = self.buffer.tensor
        self.full.copy_(flat)
        self._whole = [self.full[s.offset : s.stop].view(s.spec.shape) for s in spec.slots]
        if self.sharded:
            self.shard = flat_zeros(spec.shard_size, self.dtype, around.device)
            self.shard.copy_(self.full[self.lo : self.hi])
            self.hold("params", self.shard)
            self._placeholders = Placeholders(
                [s.spec.shape for s in spec.slots], self.dtype, around.device
            )
            self.buffer.release()
        else:
            self.shard = self.full[self.lo : self.hi]
            self.hold("params", self.full)
        self.show()
        if master is not None:
            self.master = master
            self.hold("optim", master, label="master")
        else:
            self.master = self.shard if placement.optim.sharded else self.full
        if spec.trainable:
            self.grads.allocate()

    def hold(self, kind: str, tensor: Tensor, label: str = "") -> None:
        whole = tensor.numel() == self.spec.size
        pad = self.spec.padding if whole else self.spec.padding_in(self.index)
        tier = getattr(self.around.placement, kind).tier
        self.around.ledger.hold(
            self.spec.unit,
            kind,
            tier,
            tensor.nbytes,
            label=self._label + label,
            padding=pad * tensor.element_size(),
        )

    def hold_optimizer_bytes(self, nbytes: int, padding: int) -> None:
        """Record what the optimizer allocated for this segment."""
        tier = self.around.placement.optim.tier
        self.around.ledger.hold(
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
            tier = getattr(self.around.placement, kind).tier
            self.around.ledger.hold(self.spec.unit, kind, tier, 0, label=self._label + label)

    # -- parameters --------------------------------------------------------------------------------

    def show(self) -> None:
        """Point the parameters at what they are while nobody has gathered them."""
        if self.sharded:
            self.show_released()
        else:
            self.show_whole()

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
        self.around.ledger.hold(
            self.spec.unit,
            "whole",
            self.around.placement.params.tier,
            self.buffer.nbytes,
            label=self._label,
        )
        return self.around.world.gather.all_gather(
            self.full,
            self.shard,
            tag=self.tag,
            what=f"all-gather of unit {self.spec.unit or 'root'}",
            stays=True,
        )

    def offer(self) -> None:
        """Send this rank's shard ahead of the next gather."""
        self.around.world.gather.offer(self.shard, tag=self.tag)

    def release(self) -> None:
        """Free ``full``; the shards keep the values."""
        self.show_released()
        self.buffer.release()
        self.around.ledger.hold(
            self.spec.unit, "whole", self.around.placement.params.tier, 0, label=self._label
        )

    def write_back(self) -> None:
        """Make what is in ``full`` (edited while whole) the truth: shard and master follow."""
        if self.sharded:
            self.around.world.gather.settle()
            self.shard.copy_(self.full[self.lo : self.hi])
        self.refresh_master()

    def adopt_edits(self) -> None:
        """Take over what the user wrote into replicated narrow parameters since the last step: the
        wider master copy would undo it."""
        if not self.sharded:
            self.refresh_master()

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Take the master copy from the narrow parameters, where they were edited: an element that
        still is the rounded master keeps its full width."""
        if not self.has_master_copy:
            return
        if self.master.device.type == "cpu":
            ops.adopt_edits(self.master, self.stepped)
        else:
            adopt_edits_in_torch(self.master, self.stepped)

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Set all values from ``flat`` ``[size]``, the same on every rank; the master copy keeps
        its full width."""
        if not self.sharded or self.buffer.held:
            self.full.copy_(flat)
        if self.sharded:
            self.around.world.gather.settle()
            self.shard.copy_(flat[self.lo : self.hi])
        if self.has_master_copy:
            cut = self.around.placement.optim.sharded
            self.master.copy_(flat[self.lo : self.hi] if cut else flat)

    @property
    def has_master_copy(self) -> bool:
        return self.spec.trainable and self.around.policy.master_dtype(self.dtype) is not None

    @property
    def stepped(self) -> Tensor:
        """The compute-dtype tensor that mirrors ``master``: the shard, or ``full`` where state is
        replicated."""
        return self.shard if self.around.placement.optim.sharded else self.full

    def publish(self) -> Pending:
        """Where parameters are replicated but stepped in slices: start to collect the new values in
        ``full``."""
        return self.around.world.gather.all_gather(
            self.full,
            self.shard,
            tag=self.tag,
            what=f"all-gather of the new parameters of unit {self.spec.unit or 'root'}",
        )
