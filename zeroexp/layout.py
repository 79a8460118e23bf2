"""Which bytes of which parameter lie where on which rank: pure arithmetic, no tensor, no torch.

::

    segment   [ p0 | p1 | p2 .......... | pad ]     one contiguous buffer; parameters are views
                rank 0   | rank 1 | ...             equal contiguous slices

Runtime, checkpoint, planner and tests all ask this module, for a trillion parameters as for ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeroexp import units

ALIGN = 16
"""Shards and parameters start at multiples of this many elements: one AVX-512 vector of fp32. Fused
CPU optimizers treat the last ``numel % 8`` elements with other instructions than the body, so an
unaligned cut would change results by an ulp."""

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True)
class Share:
    """Which of ``count`` equal shares a rank has of what is spread over as many ranks.

    ``ends``: what its name ends in, one by one, where each has a name of its own. Empty: the
    shares are slices of one tensor along dimension 0, which have its name.
    """

    count: int
    index: int
    ends: tuple[str, ...] = ()

    def name(self, mine: str, index: int) -> str:
        """The name of share ``index`` of what is called ``mine`` here."""
        return self.prefix(mine) + self.ends[index] if self.ends else mine

    def prefix(self, mine: str) -> str:
        """What the names of all shares begin with."""
        return mine.removesuffix(self.ends[self.index]) if self.ends else mine

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what holds all shares of one name."""
        return shape if self.ends else (self.count * shape[0], *shape[1:])


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of one parameter.

    ``aliases`` are the further names of a tied parameter. ``group`` is the optimizer group it is
    stepped in (-1: none); parameters of different groups never share a segment, so each keeps its
    own hyperparameters. One that is ``tied`` to a copy in another stage of a pipeline has a segment
    of its own, so that all copies are cut alike. ``spread``: the data-parallel ranks over which the
    shares of it lie (experts of expert parallelism); 1: each rank has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    group: int = 0
    tied: bool = False
    spread: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of_rank(self) -> ParamSpec:
        """What one rank has of a stacked parameter, of which this is the whole."""
        if self.spread == 1:
            return self
        return replace(self, shape=(self.shape[0] // self.spread, *self.shape[1:]))


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its segment; ``offset`` counts elements from the start of the
    segment."""

    spec: ParamSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one shard; all three count elements."""

    slot: Slot
    param_start: int
    shard_start: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """Parameters of one unit that share dtype, trainability, optimizer group and spread: one flat
    buffer. ``shards``: the ranks over which it is sharded, of those that hold it."""

    unit: str
    dtype: str
    trainable: bool
    group: int
    shards: int
    slots: tuple[Slot, ...]
    spread: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements of the parameters themselves."""
        return sum(s.spec.numel for s in self.slots)

    @cached_property
    def size(self) -> int:
        """Elements of the buffer: :attr:`numel` plus padding, a multiple of ``shards * ALIGN``."""
        used = self.slots[-1].stop if self.slots else 0
        return _round_up(used, self.shards * ALIGN)

    @property
    def padding(self) -> int:
        return self.size - self.numel

    @property
    def shard_size(self) -> int:
        return self.size // self.shards

    def index_of(self, rank: int) -> int:
        """The shard that data-parallel rank ``rank`` owns."""
        return rank // self.spread % self.shards

    def bounds(self, index: int) -> tuple[int, int]:
        """Start and stop of shard ``index`` in elements of the segment."""
        return index * self.shard_size, (index + 1) * self.shard_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding, as (start, stop) ranges of the segment."""
        out, at = [], 0
        for slot in self.slots:
            if slot.offset > at:
                out.append((at, slot.offset))
            at = slot.stop
        if self.size > at:
            out.append((at, self.size))
        return tuple(out)

    def padding_in(self, index: int) -> int:
        """Padding elements that lie in shard ``index``."""
        lo, hi = self.bounds(index)
        return sum(max(0, min(hi, b) - max(lo, a)) for a, b in self.gaps)

    def pieces(self, index: int) -> list[Piece]:
        """What of which parameter lies in shard ``index``."""
        lo, hi = self.bounds(index)
        out = []
        for slot in self.slots:
            start, stop = max(lo, slot.offset), min(hi, slot.stop)
            if start < stop:
                out.append(Piece(slot, start - slot.offset, start - lo, stop - start))
        return out


@dataclass(frozen=True)
class Unit:
    """What is gathered, reduced, stepped and swapped together."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.segments)


@dataclass(frozen=True)
class Layout:
    """What a rank has of a model, cut into units and segments over ``shards`` ranks."""

    units: tuple[Unit, ...]
    shards: int

    @property
    def segments(self) -> Iterable[Segment]:
        return (s for u in self.units for s in u.segments)

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def padding(self) -> int:
        return sum(s.padding for s in self.segments)

    def find(self, name: str) -> tuple[Segment, Slot]:
        """The place of parameter ``name``. Raises ``KeyError`` when no unit holds it."""
        return self._index[name]

    @cached_property
    def _index(self) -> Mapping[str, tuple[Segment, Slot]]:
        out: dict[str, tuple[Segment, Slot]] = {}
        for segment in self.segments:
            for slot in segment.slots:
                for name in (slot.spec.name, *slot.spec.aliases):
                    out[name] = (segment, slot)
        return out


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def make_segment(specs: Sequence[ParamSpec], unit: str, shards: int) -> Segment:
    """Lay ``specs`` (all of one dtype, trainability, group and spread) into one buffer, in the
    given order. ``shards`` ranks hold a copy of the model."""
    slots, at = [], 0
    for spec in specs:
        slots.append(Slot(spec, at))
        at = _round_up(at + spec.numel, ALIGN)
    first = specs[0]
    # Ranks with the same share are one in ``spread``; what a rank has alone is cut no further.
    own = max(1, shards // first.spread)
    return Segment(unit, first.dtype, first.trainable, first.group, own, tuple(slots), first.spread)


def make_unit(name: str, specs: Sequence[ParamSpec], shards: int) -> Unit:
    """Sort ``specs`` into segments, in order of first appearance."""
    kinds: dict[tuple[str, bool, int, str, int], list[ParamSpec]] = {}
    for spec in specs:
        group, alone = spec.group if spec.trainable else -1, spec.name if spec.tied else ""
        kind = (spec.dtype, spec.trainable, group, alone, spec.spread)
        kinds.setdefault(kind, []).append(spec)
    return Unit(name, tuple(make_segment(group, name, shards) for group in kinds.values()))


def make_layout(specs: Sequence[ParamSpec], *, cut: str, shards: int) -> Layout:
    """Cut ``specs`` (in the order of ``module.named_parameters()``) into a :class:`Layout`.

    ``cut`` is ``zero.unit``; ``shards`` the size of the group over which state is sharded. Of what
    is spread, ``specs`` have one rank's share.
    """
    by_unit: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        by_unit.setdefault(units.common_unit((spec.name, *spec.aliases), cut), []).append(spec)
    return Layout(tuple(make_unit(u, by_unit[u], shards) for u in units.order(by_unit)), shards)
