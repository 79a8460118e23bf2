"""The values of one segment that mirror what its optimizer steps, while they are replaced: at the
boundary, or ahead of it while backward may still read the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from zeroexp.comm import DONE, Pending

if TYPE_CHECKING:
    from zeroexp.zero.segment import SegmentState


class Mirror:
    """``[num_stepped]`` elements in the dtype that computes, on the optimizer's side of the border
    between device and host."""

    def __init__(self, segment: SegmentState) -> None:
        self._segment = segment
        self._target: Tensor | None = None
        self._waiting: Tensor | None = None

    # -- publishing --------------------------------------------------------------------------------

    @property
    def publishes(self) -> bool:
        """Whether the ranks step slices of values that each of them holds whole."""
        return self._segment.placement.optim.sharded and not self._segment.cut

    def publish(self) -> Pending:
        """Start to collect the slices that the ranks have stepped."""
        return self._publish(self._segment.resident_values)

    def _publish(self, values: Tensor) -> Pending:
        segment = self._segment
        what = f"all-gather of the new parameters of unit {segment.spec.unit or 'root'}"
        gather, lo, hi = segment.sharing.gather, segment.lo, segment.hi
        if values.device == segment.around.device:
            return gather.all_gather(values, values[lo:hi], tag=segment.tag, what=what)
        visitor = values.to(segment.around.device)  # a collective of the device, values of the host
        gather.all_gather(visitor, visitor[lo:hi], tag=segment.tag, what=what).wait()
        segment.around.border.down(visitor, values).wait()
        return DONE

    # -- at the boundary ---------------------------------------------------------------------------

    @contextmanager
    def updating(self, *, keeps: bool) -> Iterator[Tensor]:
        """The values, to be replaced; ``keeps``: only a part of them.

        What comes from disk is published, too, and back on disk when the context ends; for what
        stays in memory :meth:`publish` follows.
        """
        segment = self._segment
        segment.forget_near()
        if segment.home is None:
            yield from self._crossing(segment.stepped_part(segment.full), keeps=keeps)
            return
        with segment.home.updating(keeps=keeps) as values:
            yield from self._crossing(segment.stepped_part(values), keeps=keeps)
            if segment.home_on_disk and self.publishes:
                self._publish(values).wait()

    def _crossing(self, values: Tensor, *, keeps: bool) -> Iterator[Tensor]:
        target = self._to_optimizer(values, keeps=keeps)
        yield target
        self._from_optimizer(target, values)

    def _to_optimizer(self, values: Tensor, *, keeps: bool) -> Tensor:
        """A tensor for the new ``values`` where the optimizer works."""
        border = self._segment.around.border
        on_host = values.device.type == "cpu"
        if on_host == self._segment.optimizer_on_host:
            return values
        if on_host:
            return border.up(values).wait()
        target = border.host_like(values)
        if keeps:
            target.copy_(values)
        return target

    def _from_optimizer(self, target: Tensor, values: Tensor) -> None:
        if target is values:
            return
        if self._segment.optimizer_on_host:
            self._segment.around.border.upload(target, values)
        else:
            self._segment.around.border.down(target, values).wait()

    # -- ahead of the boundary ---------------------------------------------------------------------

    @property
    def may_be_ahead(self) -> bool:
        """Whether new values can be made while backward still reads the old ones: of a slice, of
        which only gathered copies are read, or beside a copy that the optimizer steps."""
        segment = self._segment
        beside = segment.master_copy is not None and not segment.home_on_disk
        return segment.placement.optim.sharded and (segment.cut or beside)

    def begin(self) -> Tensor:
        """The values, all to be replaced; :meth:`end` follows when they are made, :meth:`land` at
        the boundary. Those that every rank holds whole wait beside the old ones until then."""
        segment = self._segment
        segment.forget_near()
        if segment.cut:
            assert segment.home is not None
            self._target = self._to_optimizer(segment.home.take(), keeps=False)
            return self._target
        values = segment.stepped_part(segment.resident_values)
        if segment.optimizer_on_host and values.device.type != "cpu":
            self._target = segment.around.border.host_like(values)
        else:
            self._waiting = segment.around.pool.take(values.numel(), segment.dtype)
            self._target = self._waiting.view(segment.dtype)[: values.numel()]
        self._target.copy_(values)  # edits since the last step are looked for in it
        return self._target

    def end(self) -> None:
        """The new values are made; those of a slice go home."""
        segment = self._segment
        if not segment.cut:
            return
        assert segment.home is not None and self._target is not None
        target, self._target = self._target, None
        if segment.home.resident is not None:
            self._from_optimizer(target, segment.home.resident)
        segment.home.keep()

    def land(self, *, keep: bool = True) -> None:
        """Nobody reads the old values any more; ``keep=False``: the new ones are given up."""
        if self._segment.cut or self._target is None:
            return
        target, self._target = self._target, None
        values = self._segment.stepped_part(self._segment.resident_values)
        if keep and target.device == values.device:
            values.copy_(target)
        elif keep:
            self._segment.around.border.upload(target, values)
        if self._waiting is not None:
            self._segment.around.pool.give(self._waiting)
            self._waiting = None
