"""One segment at run time: the tensors behind a flat range of parameters.

* ``full``: every element, in the dtype that computes; permanent where parameters are replicated on
  the device, else filled for each use from ``home``
* ``home``: this rank's values between uses (see :mod:`zeroexp.zero.home`)
* ``master``: what the optimizer steps: the values themselves, or a copy of them that is wider or on
  the optimizer's tier
* ``grads``: see :class:`zeroexp.zero.gradient.GradientState`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroexp.comm import DONE, Pending
from zeroexp.comm.pool import flat_zeros
from zeroexp.comm.sharing import Sharing
from zeroexp.errors import ModelError
from zeroexp.layout import Segment
from zeroexp.placement import Placement, Tier
from zeroexp.tiers import Crossing
from zeroexp.zero.buffer import FlatBuffer
from zeroexp.zero.disk import OnDisk
from zeroexp.zero.gradient import GradientState
from zeroexp.zero.home import Home, MemoryHome
from zeroexp.zero.master import MasterCopy
from zeroexp.zero.mirror import Mirror
from zeroexp.zero.placeholder import Placeholders
from zeroexp.zero.surroundings import Surroundings


class SegmentState:
    """The run-time side of one :class:`zeroexp.layout.Segment`. ``tag`` is its number, the same on
    every rank; ``leaves``: whether its optimizer state and gradients may leave the device."""

    def __init__(
        self,
        spec: Segment,
        params: Sequence[nn.Parameter],
        around: Surroundings,
        tag: int,
        *,
        leaves: bool = True,
    ) -> None:
        self.spec = spec
        self.params = list(params)
        self.tag = tag
        self._names = [s.spec.name for s in spec.slots]
        self.around = around
        self._label = f"{tag}"
        self.index = self.sharing.gather.index
        self.lo, self.hi = spec.bounds(self.index)
        self.dtype = around.policy.storage_dtype(params[0].dtype)
        floating = self.dtype.is_floating_point
        placement = around.placement if leaves else around.placement.kept_on_device()
        self.placement = placement if floating else placement.whole_on_device()
        self.cut = self.placement.params.sharded
        """Whether this rank holds a slice of the parameters, not all of them."""
        self.transient = self.cut or self.placement.params.tier is not Tier.DEVICE
        """Whether ``full`` is there only while it is used."""
        wide = around.policy.master_dtype(self.dtype)
        self.has_master_copy = spec.trainable and (
            wide is not None or self.placement.separates_master or around.delayed
        )
        """Whether the optimizer steps a copy."""
        self.master_dtype = wide or self.dtype
        """What the optimizer steps has this dtype."""
        self.num_stepped = spec.shard_size if self.placement.optim.sharded else spec.size
        """Elements that this rank steps."""
        self.counted = True
        """Whether its gradients are part of this group's norm: not those of a tied weight that
        another stage of a pipeline counts."""
        self.on_disk: OnDisk | None = None
        """Its records on the nvme tier, if it has any."""
        self.home: Home | None = None
        self.master_copy: MasterCopy | None = None
        self._near: Crossing | None = None
        self.mirror = Mirror(self)
        """The values, as the optimizer replaces them."""
        self.grads = GradientState(self)
        """Its gradients; empty unless it is trainable."""

    @property
    def sharing(self) -> Sharing:
        """The ranks that hold it, or a share of it."""
        return self.around.world.sharing(self.spec.spread)  # made anew when the world opens again

    # -- construction ------------------------------------------------------------------------------

    def take_over(self, flat: Tensor) -> None:
        """Build all state from ``flat`` ``[size]``, the whole segment in the dtype the user built;
        point the parameters at it (or at placeholders)."""
        around, spec = self.around, self.spec
        self.buffer = FlatBuffer(spec.size, self.dtype, around.device, around.spare)
        self.full = self.buffer.tensor
        self.full.copy_(flat)
        self._whole = [self.full[s.offset : s.stop].view(s.spec.shape) for s in spec.slots]
        if self.transient:
            self.home = self._settle(self.full[self.lo : self.hi] if self.cut else self.full)
            self._placeholders = Placeholders(
                [s.spec.shape for s in spec.slots], self.dtype, around.device
            )
            self.buffer.release()
        else:
            self.hold("params", self.full.nbytes)
        self.show()
        if self.has_master_copy:
            mine = flat[self.lo : self.hi] if self.placement.optim.sharded else flat
            self.master_copy = self._make_master(mine)
            self.master_copy.write(mine)
        if spec.trainable:
            self.grads.allocate()

    def _settle(self, values: Tensor) -> Home:
        self.hold("params", values.nbytes)
        if self.on_disk is not None and self.on_disk.params is not None:
            self.on_disk.params.write(values)
            return self.on_disk.params
        resident = self.zeros(values.numel(), self.dtype, self.placement.params.tier)
        resident.copy_(values)
        return MemoryHome(resident)

    def _make_master(self, values: Tensor) -> MasterCopy:
        self.hold("optim", values.numel() * self.master_dtype.itemsize, label="master")
        if self.on_disk is not None and self.on_disk.optim is not None:
            return MasterCopy(disk=self.on_disk.optim)
        tier = self.placement.optim.tier
        return MasterCopy(tensor=self.zeros(values.numel(), self.master_dtype, tier))

    def zeros(self, numel: int, dtype: torch.dtype, tier: Tier) -> Tensor:
        """A flat tensor ``[numel]`` of zeros that stays, in the memory of ``tier``."""
        if tier is Tier.DEVICE:
            return flat_zeros(numel, dtype, self.around.device)
        return self.around.border.host_zeros(numel, dtype)

    def hold(self, kind: str, nbytes: int, label: str = "", *, sharded: bool | None = None) -> None:
        """Record ``nbytes`` of ``kind`` on its tier; ``sharded`` where it is not what the placement
        says."""
        where: Placement = getattr(self.placement, kind)
        cut = where.sharded if sharded is None else sharded
        pad = self.spec.padding_in(self.index) if cut else self.spec.padding
        elements = self.spec.shard_size if cut else self.spec.size
        self.around.ledger.hold(
            self.spec.unit,
            kind,
            where.tier,
            nbytes,
            label=self._label + label,
            padding=pad * nbytes // elements if elements else 0,
        )

    def hold_optimizer_bytes(self, nbytes: int, padding: int) -> None:
        """Record what the optimizer allocated for this segment."""
        tier = self.placement.optim.tier
        self.around.ledger.hold(
            self.spec.unit, "optim", tier, nbytes, label=self._label + "state", padding=padding
        )

    def hold_delayed(self, nbytes: int) -> None:
        """Record the copies of gradients and values that a delayed step needs; in host memory."""
        self.around.ledger.hold(
            self.spec.unit, "optim", Tier.CPU, nbytes, label=self._label + "delayed"
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
            tier = getattr(self.placement, kind).tier
            self.around.ledger.hold(self.spec.unit, kind, tier, 0, label=self._label + label)

    # -- parameters --------------------------------------------------------------------------------

    def show(self) -> None:
        """Point the parameters at what they are while nobody has gathered them."""
        if self.transient:
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
        if self.transient:
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

    def prefetch(self) -> None:
        """A gather will follow soon: bring the values from where they are at home."""
        if self.home is not None:
            self.home.prefetch()

    def bring_up(self) -> None:
        """The gather is next but one: start to bring the values from the host to the device."""
        off_device = self.placement.params.tier is not Tier.DEVICE
        if self.home is not None and off_device and self.around.border.divides:
            self._near = self._near or self.around.border.up(self.home.fetch())

    def gather(self) -> Pending:
        """Start to fill ``full`` from where the values are at home."""
        assert self.home is not None
        self._placeholders.check(self._names)
        self.buffer.acquire()
        ledger = self.around.ledger
        ledger.hold(self.spec.unit, "whole", Tier.DEVICE, self.buffer.nbytes, label=self._label)
        if self.placement.params.tier is Tier.DEVICE:
            values = self.home.fetch()
        else:
            near, self._near = self._near, None
            values = (near or self.around.border.up(self.home.fetch())).wait()
            ledger.moved("up", values.nbytes)
        if not self.cut:
            self.full.copy_(values)
            self.home.put_back()
            return DONE
        return self.sharing.gather.all_gather(
            self.full,
            values,
            tag=self.tag,
            what=f"all-gather of unit {self.spec.unit or 'root'}",
            stays=True,
        )

    def arrived(self) -> None:
        """The gather is over. A visitor from disk leaves memory when the peers have it, too."""
        if self.home is not None and self.home_on_disk and self.cut:
            self.sharing.gather.settle(self.tag)
            self.home.put_back()

    def offer(self) -> None:
        """Send this rank's shard ahead of the next gather."""
        if self.cut and self.home is not None and not self.around.border.divides:
            self.sharing.gather.offer(self.home.fetch(), tag=self.tag)

    def release(self) -> None:
        """Free ``full``; the values are at home."""
        self.show_released()
        self.buffer.release()
        self.around.ledger.hold(self.spec.unit, "whole", Tier.DEVICE, 0, label=self._label)

    # -- what the optimizer steps ------------------------------------------------------------------

    @property
    def master(self) -> Tensor | None:
        """What the optimizer steps ``[num_stepped]``; ``None`` where it is on disk."""
        if self.master_copy is not None:
            return self.master_copy.tensor
        values = self.full if self.home is None else self.home.resident
        return None if values is None else self.stepped_part(values)

    def read_values(self) -> Tensor:
        """This rank's part of the values in their full width, in memory, only to be read."""
        if self.master_copy is not None:
            return self.master_copy.read()
        if self.home is None:
            return self.full
        values = self.home.fetch()
        if self.home_on_disk:
            values = values.clone()
            self.home.put_back()
        return values

    def stepped_part(self, values: Tensor) -> Tensor:
        """The part of ``full`` or ``home`` that mirrors ``master``."""
        partly = values.numel() > self.num_stepped
        return values[self.lo : self.hi] if partly else values

    @property
    def home_on_disk(self) -> bool:
        """Whether the values are on disk between uses."""
        return self.home is not None and self.home.resident is None

    @property
    def resident_values(self) -> Tensor:
        """The values in the dtype that computes, where they stay in memory."""
        values = self.full if self.home is None else self.home.resident
        assert values is not None
        return values

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the optimizer works in host memory."""
        one_memory = self.around.device.type == "cpu"
        return one_memory or self.placement.optim.tier is not Tier.DEVICE

    def forget_near(self) -> None:
        """The values change: what was brought up for the next gather is old."""
        self._near = None

    @property
    def needs_pieces(self) -> bool:
        """Whether it is stepped in pieces, as it comes from disk."""
        copy = self.master_copy
        return self.home_on_disk or (copy is not None and copy.tensor is None)

    def count_transfers(self) -> None:
        """Record what one step moves between the tiers, gathers and reductions apart."""
        where, moved = self.placement, self.around.ledger.moved
        values = self.num_stepped * self.dtype.itemsize
        if where.optim.tier is Tier.DEVICE:
            if where.params.tier is not Tier.DEVICE:
                moved("down", values)
            return
        if not where.grads.sharded:
            moved("down", self.num_stepped * self.grads.dtype.itemsize)
        if where.params.tier is Tier.DEVICE:
            moved("up", values)

    # -- edits -------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Make what is in ``full`` (edited while whole) the truth: home and master follow."""
        if self.home is not None:
            self.forget_near()
            self.sharing.gather.settle()
            self.home.write(self.full[self.lo : self.hi] if self.cut else self.full)
        self._refresh_master()

    def adopt_edits(self) -> None:
        """Take over what the user wrote into replicated narrow parameters since the last step: the
        master copy would undo it. Not beside a delayed step, whose master copy is ahead."""
        if not self.transient and self.master is not None and not self.around.delayed:
            self._refresh_master()

    def _refresh_master(self) -> None:
        if self.master_copy is None:
            return
        low = self.stepped_part(self.full)
        if self.optimizer_on_host and low.device.type != "cpu":
            low = self.around.border.down(low).wait()
        self.master_copy.adopt(low)

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Set all values from ``flat`` ``[size]``, the same on every rank; the master copy keeps
        its full width."""
        if not self.transient or self.buffer.held:
            self.full.copy_(flat)
        if self.home is not None:
            self.forget_near()
            self.sharing.gather.settle()
            self.home.write((flat[self.lo : self.hi] if self.cut else flat).to(self.dtype))
        if self.master_copy is not None:
            self.master_copy.write(
                flat[self.lo : self.hi] if self.placement.optim.sharded else flat
            )
