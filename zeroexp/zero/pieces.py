"""One step in pieces: segments as their gradients become complete, chunks as they come from disk.
While a chunk is stepped, the next one is read and the one before is written (Rajbhandari et al.,
arXiv:2104.07857, section 5.1.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroexp.errors import OptimizerError
from zeroexp.optim.face import Face, State
from zeroexp.optim.history import Run, per_element
from zeroexp.optim.twin import Twin
from zeroexp.zero.disk import DiskState
from zeroexp.zero.master import adopt
from zeroexp.zero.passes import FusesPasses, give_gradient, settings, write_copies
from zeroexp.zero.segment import SegmentState

_READ_AHEAD = 2
"""Chunks that are read while one is stepped; with that one, and one on its way to the disk, they
fill the ring."""


class Piece:
    """Elements ``[start, stop)`` of a segment's stepped tensor, all of one run."""

    def __init__(self, run: Run, start: int, stop: int, master: Tensor) -> None:
        self.run = run
        self.start = start
        self.stop = stop
        whole = (start, stop) == (run.start, run.stop)
        # The tensor of a run that is in memory must stay itself: its state is known by it.
        reshape = whole and master.shape != run.tensor.shape
        self.master = master.view(run.tensor.shape) if reshape else master


class PieceStep:
    """One step of the optimizer behind ``face``, whose first parameter group has number
    ``first_group``; gradients are multiplied by ``scale``.

    :meth:`step` may run on another thread, one call at a time.
    """

    def __init__(self, face: Face, scale: float, first_group: int) -> None:
        self._face = face
        self._optimizer = face.optimizer
        self._twin = Twin(face.optimizer)
        self._scale = scale
        self._first_group = first_group
        self._announced: set[int] = set()
        self._ahead: list[tuple[DiskState, int]] = []

    @property
    def outdated(self) -> bool:
        """Whether hyperparameters were changed since the step began."""
        return self._twin.changed()

    def announce(self, segment: SegmentState, runs: Sequence[Run]) -> None:
        """:meth:`step` will probably follow for ``segment``, in the order of announcement: what it
        needs from disk is read ahead."""
        disk = _disk_of(segment)
        if disk is not None and segment.tag not in self._announced:
            self._announced.add(segment.tag)
            self._ahead += [
                (disk, chunk)
                for chunk, bounds in enumerate(disk.chunks)
                if _overlapping(runs, *bounds)
            ]

    def prefetch(self) -> None:
        """Start to read what was announced, as far as there is room."""
        for disk, chunk in self._ahead[:_READ_AHEAD]:
            disk.prefetch(chunk)

    @torch.no_grad()
    def step(
        self, segment: SegmentState, runs: Sequence[Run], gradient: Tensor, values: Tensor
    ) -> None:
        """Step ``runs`` of ``segment`` with its ``gradient``, and write what mirrors the master
        copy into ``values``, both ``[num_stepped]``."""
        if self._scale != 1.0 and not isinstance(self._optimizer, FusesPasses):
            gradient.mul_(self._scale)
        disk = _disk_of(segment)
        if disk is not None:
            self._step_chunks(segment, disk, runs, gradient, values)
            return
        pieces = [Piece(r, r.start, r.stop, r.tensor) for r in runs]
        self._step_pieces(segment, pieces, gradient, values, self._face.state)

    def finish(self) -> None:
        """All of the step is done."""
        self._twin.finish()

    def _step_chunks(
        self,
        segment: SegmentState,
        disk: DiskState,
        runs: Sequence[Run],
        gradient: Tensor,
        values: Tensor,
    ) -> None:
        after: dict[Tensor, dict[str, Any]] = {}
        for chunk, (start, stop) in enumerate(disk.chunks):
            inside = _overlapping(runs, start, stop)
            if not inside:
                continue
            columns = disk.open(chunk)
            if (disk, chunk) in self._ahead:
                del self._ahead[: self._ahead.index((disk, chunk)) + 1]
            self.prefetch()
            try:
                # What the user may have written since the last step.
                if not segment.transient and not segment.around.delayed:
                    adopt(columns["master"], values[start:stop])
                pieces = []
                for run in inside:
                    a, b = max(run.start, start), min(run.stop, stop)
                    pieces.append(Piece(run, a, b, columns["master"][a - start : b - start]))
                state = self._state_of(pieces, columns, start)
                self._step_pieces(segment, pieces, gradient, values, state)
                for piece in pieces:
                    entry = self._put_away(piece, state[piece.master], columns, start)
                    after.setdefault(piece.run.tensor, entry)
            except BaseException:
                disk.drop(chunk)
                raise
            disk.keep(chunk)
        # Not earlier: each piece of a run begins with the scalars that the run began with.
        self._face.state.update(after)

    def _step_pieces(
        self,
        segment: SegmentState,
        pieces: Sequence[Piece],
        gradient: Tensor,
        values: Tensor,
        state: State,
    ) -> None:
        groups: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        groups[segment.spec.group - self._first_group] = [p.master for p in pieces]
        copies = {}
        if segment.master_copy is not None:
            copies = {p.master: values[p.start : p.stop].view(p.master.shape) for p in pieces}
        for piece in pieces:
            part = gradient[piece.start : piece.stop].view(piece.master.shape)
            give_gradient(self._optimizer, piece.master, part)
        saved = settings(self._optimizer, self._scale, copies)
        try:
            self._twin.step(groups, state, attributes=saved)
        finally:
            for piece in pieces:
                piece.master.grad = None
        if not saved:
            write_copies(copies)

    def _state_of(
        self, pieces: Sequence[Piece], columns: dict[str, Tensor], first: int
    ) -> defaultdict[Tensor, dict[str, Any]]:
        """The state of each piece: what is per element in the open chunk, copies of the rest."""
        out: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for piece in pieces:
            for name, value in self._face.state.get(piece.run.tensor, {}).items():
                if per_element(value, piece.run):
                    part = columns[name][piece.start - first : piece.stop - first]
                    out[piece.master][name] = part.view(piece.master.shape)
                else:
                    out[piece.master][name] = value.clone() if isinstance(value, Tensor) else value
        return out

    def _put_away(
        self, piece: Piece, state: dict[str, Any], columns: dict[str, Tensor], first: int
    ) -> dict[str, Any]:
        """What is per element goes to its column, and a stand-in without memory to the entry of the
        run; the rest is the entry."""
        entry: dict[str, Any] = {}
        for name, value in state.items():
            if (
                not isinstance(value, Tensor)
                or value.dim() == 0
                or (value.shape != piece.master.shape)
            ):
                entry[name] = value
                continue
            if name not in columns:
                raise OptimizerError(
                    f"{type(self._optimizer).__name__} has begun to keep {name} for each element, "
                    "which it did not when its place on disk was reserved. Use offload=cpu."
                )
            column = columns[name][piece.start - first : piece.stop - first]
            if value.data_ptr() != column.data_ptr():
                column.copy_(value.reshape(-1))
            entry[name] = torch.empty(piece.run.tensor.shape, dtype=value.dtype, device="meta")
        return entry


def _disk_of(segment: SegmentState) -> DiskState | None:
    return segment.on_disk.optim if segment.on_disk is not None else None


def _overlapping(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    return [r for r in runs if r.start < stop and r.stop > start]
