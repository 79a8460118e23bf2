"""Resident state and traffic of one step, to the byte, from the layout.

Formulas: Rajbhandari et al., arXiv:1910.02054, sections 5 and 7, with the padding of
:mod:`zeroexp.layout` counted in and listed apart. Traffic is what a rank sends, ``(N-1)/N`` of each
padded tensor per collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroexp.config import Config
from zeroexp.layout import Layout, ParamSpec, Segment, make_layout
from zeroexp.placement import STAGES, Placement, StatePlacement, Tier
from zeroexp.plan.experts import all_to_all_bytes
from zeroexp.plan.formats import NAMES, UnitUse, formats, is_floating, reductions, use_of
from zeroexp.plan.layer_shape import LayerShape
from zeroexp.plan.pipeline import PipelinePlan, plan_pipeline
from zeroexp.plan.tiers import file_traffic, homes, leaving_segments, optimizer_shares, transfers


@dataclass(frozen=True)
class Prediction:
    """Bytes per rank. Keys are rank numbers, kinds, tiers and ops, as in ``result.json``.

    ``transfer_bytes_per_step`` is what goes from the device to the other tiers (``down``) and comes
    from them (``up``), ``offloaded`` the part of the optimizer state that leaves the device,
    ``pipeline`` what is known of the pipeline where there is one.
    """

    state_bytes: dict[int, dict[str, dict[str, int]]]
    padding_bytes: dict[int, int]
    comm_bytes_per_step: dict[int, dict[str, int]]
    transfer_bytes_per_step: dict[int, dict[str, int]]
    io_bytes_per_step: dict[int, dict[str, int]]
    offloaded: float = 0.0
    pipeline: PipelinePlan | None = None

    def to_dict(self) -> dict[str, object]:
        """The same with string keys, as JSON has them."""
        return {
            name: {str(rank): value for rank, value in getattr(self, name).items()}
            for name in (
                "state_bytes",
                "padding_bytes",
                "comm_bytes_per_step",
                "transfer_bytes_per_step",
                "io_bytes_per_step",
            )
        }

    def total(self, rank: int = 0) -> int:
        """All resident state bytes of ``rank``."""
        return sum(n for kind in self.state_bytes[rank].values() for n in kind.values())


@dataclass(frozen=True)
class _Part:
    """What one rank of a pipe holds; without a pipeline, the model. ``uses`` are those of each
    unit, ``copies`` the ranks of the pipe that hold a parameter, by name; ``sent``: bytes to other
    stages."""

    layout: Layout
    uses: list[UnitUse]
    copies: Mapping[str, int] = field(default_factory=dict)
    sent: int = 0

    @property
    def num_spread(self) -> int:
        """Modules whose parameters are spread over ranks."""
        slots = [slot for segment in self.layout.segments for slot in segment.slots]
        spread = {slot.spec.name for slot in slots if slot.spec.spread > 1}
        return len({name.rpartition(".")[0] for name in spread})


def predict(
    config: Config, specs: Sequence[ParamSpec], shapes: Sequence[LayerShape] | None = None
) -> Prediction:
    """Predict ``config`` for a whole model of ``specs`` and, with a pipeline, of layers of
    ``shapes`` (built-in models give both, see :mod:`zeroexp.models.specs`).

    Raises :class:`zeroexp.errors.ConfigError` for a pipeline that this model cannot be cut for.
    """
    config = config.resolved()
    data_ranks, shards = config.data_ranks, config.shard_size
    compute = NAMES[config.precision.compute]
    stored = [
        replace(s.of_rank(), dtype=_stored(s.dtype, compute), group=_group(config, s))
        for s in specs
    ]
    pipeline = None
    if config.pipeline.is_on:
        if shapes is None:
            raise ValueError("a pipeline is planned from the shapes of the layers")
        pipeline = plan_pipeline(config, stored, shapes)
    parts = _parts(config, stored, shards, pipeline)
    comm, moved, files = [], [], []
    for part in parts:
        comm.append(_traffic(config, part, STAGES[config.zero.stage], data_ranks))
        moved.append(transfers(config, part.layout, part.uses))
        files.append(file_traffic(config, part.layout, part.uses))
    state, padding = {}, {}
    place = {rank: rank // data_ranks for rank in range(config.ranks)}
    for rank, at in place.items():
        state[rank], padding[rank] = _state(config, parts[at], rank % data_ranks)
    away = sum(sum(leaving_segments(config, part.layout).values()) for part in parts)
    whole = sum(sum(optimizer_shares(config, part.layout).values()) for part in parts)
    return Prediction(
        state,
        padding,
        {rank: dict(comm[at]) for rank, at in place.items()},
        {rank: dict(moved[at]) for rank, at in place.items()},
        {rank: dict(files[at]) for rank, at in place.items()},
        away / max(1, whole),
        pipeline,
    )


def _parts(
    config: Config, specs: Sequence[ParamSpec], shards: int, pipeline: PipelinePlan | None
) -> list[_Part]:
    """The part of each rank of a pipe."""
    cut = config.zero.unit
    if pipeline is None:
        layout = make_layout(specs, cut=cut, shards=shards)
        return [_Part(layout, [use_of(config, unit.name) for unit in layout.units])]
    parts = []
    for place in range(config.pipeline.size):
        held = pipeline.held(place, specs)
        layout = make_layout(held, cut=cut, shards=shards)
        uses = []
        for unit in layout.units:
            names = {slot.spec.name for segment in unit.segments for slot in segment.slots}
            stages = pipeline.stages_using(place, names)
            uses.append(
                UnitUse(pipeline.num_gathers(place, stages), reductions(config) * len(stages))
            )
        copies = {spec.name: pipeline.num_holders(spec.name) for spec in held}
        parts.append(_Part(layout, uses, copies, pipeline.sent_bytes(place)))
    return parts


def _stored(dtype: str, compute: str) -> str:
    floating = dtype.startswith(("float", "bfloat"))
    return compute if floating and compute != "float32" else dtype


def _group(config: Config, spec: ParamSpec) -> int:
    """The group that :func:`zeroexp.optim.build` puts a parameter in."""
    return int(not config.optim.decays(spec.name, len(spec.shape)))


def _state(config: Config, part: _Part, rank: int) -> tuple[dict[str, dict[str, int]], int]:
    out = {kind: {tier.value: 0 for tier in Tier} for kind in ("params", "grads", "optim")}
    padding = 0

    def add(kind: str, segment: Segment, where: Placement, itemsize: int) -> None:
        nonlocal padding
        size = segment.shard_size if where.sharded else segment.size
        out[kind][where.tier.value] += size * itemsize
        gap = segment.padding_in(segment.index_of(rank)) if where.sharded else segment.padding
        padding += gap * itemsize

    layout = part.layout
    of_units = zip(layout.units, part.uses, strict=True)
    uses = [use for unit, use in of_units for _ in unit.segments]
    for segment, use, home in zip(layout.segments, uses, homes(config, layout), strict=True):
        sizes = formats(config, segment, home)
        # Integers have no NaN to stand for what is elsewhere: they stay, whole.
        params = home.params if is_floating(segment) else Placement(sharded=False)
        add("params", segment, params, sizes.param)
        if segment.trainable:
            add("grads", segment, home.grads, sizes.grad)
            if not home.grads.sharded and use.reduced > 1:
                # sums of earlier micro-batches
                add("grads", segment, Placement(sharded=True), sizes.grad)
            add("optim", segment, home.optim, sizes.optim)
    return out, padding


def _traffic(config: Config, part: _Part, placement: StatePlacement, ranks: int) -> dict[str, int]:
    layout = part.layout
    total = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "send": part.sent}
    total["all_to_all"] = all_to_all_bytes(config, part.num_spread)
    for unit, use in zip(layout.units, part.uses, strict=True):
        for segment in unit.segments:
            sizes = formats(config, segment, placement)
            share = (segment.shards - 1) * segment.shard_size
            replicas = ranks // (segment.spread * segment.shards)
            if placement.params.sharded and is_floating(segment):
                total["all_gather"] += share * sizes.param * use.whole
            if not segment.trainable:
                continue
            total["reduce_scatter"] += share * sizes.wire * use.reduced
            if not placement.params.sharded and placement.optim.sharded:
                total["all_gather"] += share * sizes.param
            elif not placement.optim.sharded:
                total["all_gather"] += share * sizes.grad
            if replicas > 1:
                total["all_reduce"] += (replicas - 1) * segment.shard_size * sizes.grad
            copies = part.copies.get(segment.slots[0].spec.name, 1)  # a tied one is alone in it
            total["all_reduce"] += (copies - 1) * segment.shard_size * sizes.grad
    return {op: n for op, n in total.items() if n}
