"""What one engine keeps on the nvme tier: which record of which file belongs to which segment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.comm.pool import BufferPool
from zeroexp.config import Config
from zeroexp.layout import Segment
from zeroexp.ledger import Ledger
from zeroexp.optim.columns import ANY_SHAPE, Column, state_columns
from zeroexp.optim.elementwise import is_elementwise
from zeroexp.placement import Placement, StatePlacement, Tier
from zeroexp.tiers import FileEngine, Ring, ScratchFolder, SwapFile, Traffic
from zeroexp.zero.home import DiskHome, Outgoing

if TYPE_CHECKING:
    from zeroexp.zero.segment import SegmentState

_LOG = logging.getLogger("zeroexp")

_SLOTS = 4
"""Chunks in memory: one is read, one is stepped, one is written, and one has just been."""

_ELEMENTS = 4096
"""Chunks are multiples of this many elements: their columns then begin at blocks of the disk, and
fused optimizers round no tail inside a segment."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Stepping:
    """How the optimizer of a parameter group wants its state: ``columns`` beside the master copy,
    and whether it must see ``whole`` parameters."""

    columns: tuple[Column, ...]
    whole: bool


class DiskState:
    """Master copy and optimizer state of one segment: records of a few columns each, for elements
    ``[start, stop)`` of what is stepped."""

    def __init__(
        self, numel: int, columns: Sequence[Column], chunks: Sequence[tuple[int, int]]
    ) -> None:
        self.numel = numel
        self.columns = tuple(columns)
        self.chunks = tuple(chunks)
        self._file: SwapFile | None = None
        self._first = 0

    def place(self, file: SwapFile, first: int) -> None:
        """Its records are those of ``file`` from number ``first`` on."""
        self._file, self._first = file, first

    @property
    def record_bytes(self) -> list[int]:
        return [self._offsets(stop - start)[-1] for start, stop in self.chunks]

    def _offsets(self, elements: int) -> list[int]:
        offsets = [0]
        for column in self.columns:
            end = offsets[-1] + elements * column.dtype.itemsize
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        return offsets

    @property
    def file(self) -> SwapFile:
        assert self._file is not None
        return self._file

    def prefetch(self, chunk: int) -> None:
        """Start to read a chunk, if there is room for it."""
        self.file.prefetch(self._first + chunk)

    def open(self, chunk: int) -> dict[str, Tensor]:
        """The columns of a chunk by name, in memory until :meth:`keep` or :meth:`drop`."""
        raw = self.file.open(self._first + chunk)
        start, stop = self.chunks[chunk]
        offsets = self._offsets(stop - start)
        return {
            column.name: raw[at : at + (stop - start) * column.dtype.itemsize].view(column.dtype)
            for column, at in zip(self.columns, offsets, strict=False)
        }

    def keep(self, chunk: int) -> None:
        """What was changed in an open chunk is written, beside what follows."""
        self.file.keep(self._first + chunk)

    def drop(self, chunk: int) -> None:
        """An open chunk was only read."""
        self.file.drop(self._first + chunk)

    def read(self, name: str) -> Tensor:
        """A whole column ``[numel]``."""
        dtype = next(c.dtype for c in self.columns if c.name == name)
        out = torch.empty(self.numel, dtype=dtype)
        for chunk, (start, stop) in enumerate(self.chunks):
            out[start:stop].copy_(self.open(chunk)[name])
            self.drop(chunk)
        return out

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Replace elements ``[start, start + len(values))`` of a column."""
        end = start + values.numel()
        for chunk, (first, last) in enumerate(self.chunks):
            lo, hi = max(first, start), min(last, end)
            if lo < hi:
                self.open(chunk)[name][lo - first : hi - first].copy_(
                    values[lo - start : hi - start]
                )
                self.keep(chunk)


@dataclass(frozen=True)
class OnDisk:
    """The records of one segment; ``None`` for a kind that is elsewhere."""

    params: DiskHome | None
    grads: DiskHome | None
    optim: DiskState | None


class Disk:
    """The swap files of one rank. ``stepping`` says, for an optimizer group, the dtype that is
    stepped and the shapes of the parameters, how its optimizer wants its state. Raises
    :class:`ConfigError` for a folder that cannot be used, :class:`FileError` when the disk is full.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        *,
        rank: int,
        stepping: Callable[[int, torch.dtype, Sequence[tuple[int, ...]]], Stepping],
    ) -> None:
        nvme = config.offload.nvme
        assert nvme.dir is not None
        self._folder = ScratchFolder(Path(nvme.dir), f"rank{rank}")
        self._engine = FileEngine(
            nvme.engine,
            queue_depth=nvme.queue_depth,
            block_size=nvme.block_size,
            threads=nvme.threads,
        )
        self._rank = rank
        self._told = False
        self._checksum = nvme.checksum
        self._chunk = config.offload.chunk
        self._ledger = ledger
        self._stepping = stepping
        self.rings: list[Ring] = []
        """Where chunks of optimizer state visit memory."""
        self._pool = BufferPool(torch.device("cpu"), ledger, "visitors from disk", Tier.CPU)
        self._outgoing = Outgoing()
        self._files: list[SwapFile] = []
        self.traffic = Traffic()
        """Bytes read and written, and the time spent on them."""

    def reserve(self, segments: Sequence[SegmentState]) -> None:
        """Give each of ``segments`` its records, in files whose blocks are allocated now."""
        params = [s for s in segments if s.placement.params.tier is Tier.NVME]
        trained = [s for s in segments if s.spec.trainable]
        grads = [s for s in trained if s.placement.grads.tier is Tier.NVME]
        optim = [s for s in trained if s.placement.optim.tier is Tier.NVME]
        states = {s.tag: self._state(s) for s in optim}
        homes = {
            "params": self._homes("params", params, [s.dtype for s in params]),
            "grads": self._homes("grads", grads, [s.grads.dtype for s in grads]),
        }
        sizes = [n for s in optim for n in states[s.tag].record_bytes]
        if sizes:
            file = self._file("optim", sizes)
            first = 0
            for state in states.values():
                state.place(file, first)
                first += len(state.chunks)
        for s in segments:
            mine = (homes["params"].get(s.tag), homes["grads"].get(s.tag), states.get(s.tag))
            if any(part is not None for part in mine):
                s.on_disk = OnDisk(*mine)
        self._tell_if_buffered()

    def _tell_if_buffered(self) -> None:
        """Say once that the page cache is in between: slower than the disk, and memory that no plan
        counts."""
        reasons = {line.partition(": ")[2] for line in self._engine.status().buffered}
        if reasons and self._rank == 0 and not self._told:
            self._told = True
            _LOG.warning(
                "offload.nvme.dir %s: swap files go through the page cache (%s)",
                self._folder.path.parent,
                "; ".join(sorted(reasons)),
            )

    def _homes(
        self, kind: str, segments: Sequence[SegmentState], dtypes: Sequence[torch.dtype]
    ) -> dict[int, DiskHome]:
        sizes = []
        for segment, dtype in zip(segments, dtypes, strict=True):
            where: Placement = getattr(segment.placement, kind)
            numel = segment.spec.shard_size if where.sharded else segment.spec.size
            sizes.append((segment.tag, numel, dtype))
        if not sizes:
            return {}
        file = self._file(kind, [numel * dtype.itemsize for _, numel, dtype in sizes])
        return {
            tag: DiskHome(file, record, numel, dtype, self._pool, self._outgoing)
            for record, (tag, numel, dtype) in enumerate(sizes)
        }

    def _state(self, segment: SegmentState) -> DiskState:
        shapes = [slot.spec.shape for slot in segment.spec.slots]
        stepping = self._stepping(segment.spec.group, segment.master_dtype, shapes)
        columns = (Column("master", segment.master_dtype), *stepping.columns)
        width = sum(c.dtype.itemsize for c in columns)
        step = max(_ELEMENTS, self._chunk // width // _ELEMENTS * _ELEMENTS)
        return DiskState(
            segment.num_stepped,
            columns,
            _parameters(segment.spec) if stepping.whole else _even(segment.num_stepped, step),
        )

    def _file(self, kind: str, record_bytes: Sequence[int]) -> SwapFile:
        ring = self._ring(max(record_bytes)) if kind == "optim" else self._ring(_ELEMENTS)
        path = self._folder.path / f"{kind}-{len(self._files)}.swap"
        file = SwapFile(
            self._engine, path, record_bytes, ring, self.traffic, checksum=self._checksum
        )
        self._files.append(file)
        return file

    def _ring(self, slot_bytes: int) -> Ring:
        for ring in self.rings:
            if ring.slot_bytes >= slot_bytes:
                return ring
        self.rings.append(Ring(_SLOTS, slot_bytes))
        nbytes = sum(ring.num_bytes for ring in self.rings)
        self._ledger.hold("", "workspace", Tier.CPU, nbytes, label="chunks of optimizer state")
        return self.rings[-1]

    def drop_buffers(self) -> None:
        """Give up the memory that values visit and that none is in now."""
        self._pool.drop()

    def flush(self) -> None:
        """Wait until all that was kept is written; raise what went wrong."""
        for file in self._files:
            file.flush()


def _even(numel: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def _parameters(spec: Segment) -> list[tuple[int, int]]:
    """One chunk per parameter, and one for each gap between them."""
    cuts = sorted({0, spec.size, *(x for s in spec.slots for x in (s.offset, s.stop))})
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def disk_for(
    config: Config,
    placement: StatePlacement,
    ledger: Ledger,
    optimizers: Sequence[Optimizer],
    rank: int,
) -> Disk | None:
    """The files that ``placement`` needs, for state of ``optimizers``; ``None`` where it needs
    none."""
    if not placement.uses(Tier.NVME):
        return None
    whole = {id(o): not is_elementwise(o) for o in optimizers}

    def stepping(number: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> Stepping:
        for optimizer in optimizers:
            if number < len(optimizer.param_groups):
                tried = shapes if whole[id(optimizer)] else (ANY_SHAPE,)
                columns = state_columns(optimizer, number, dtype, tried)
                return Stepping(columns, whole[id(optimizer)])
            number -= len(optimizer.param_groups)
        raise IndexError(number)

    return Disk(config, ledger, rank=rank, stepping=stepping)
