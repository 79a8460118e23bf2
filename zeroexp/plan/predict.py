"""Resident state and traffic of one step, to the byte, from the layout.

Formulas: Rajbhandari et al., arXiv:1910.02054, sections 5 and 7, with the padding of
:mod:`zeroexp.layout` counted in and listed apart. Traffic is what a rank sends, ``(N-1)/N`` of each
padded tensor per collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroexp.config import Config
from zeroexp.layout import Layout, ParamSpec, Segment, make_layout
from zeroexp.placement import STAGES, Placement, StatePlacement, Tier
from zeroexp.plan.experts import all_to_all_bytes
from zeroexp.plan.formats import NAMES, formats, gathers, is_floating, reductions
from zeroexp.plan.tiers import file_traffic, homes, leaving_segments, optimizer_shares, transfers


@dataclass(frozen=True)
class Prediction:
    """Bytes per rank. Keys are rank numbers, kinds, tiers and ops, as in ``result.json``.

    ``transfer_bytes_per_step`` is what goes from the device to the other tiers (``down``) and comes
    from them (``up``), ``offloaded`` the part of the optimizer state that leaves the device.
    """

    state_bytes: dict[int, dict[str, dict[str, int]]]
    padding_bytes: dict[int, int]
    comm_bytes_per_step: dict[int, dict[str, int]]
    transfer_bytes_per_step: dict[int, dict[str, int]]
    io_bytes_per_step: dict[int, dict[str, int]]
    offloaded: float = 0.0

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


def predict(config: Config, specs: Sequence[ParamSpec]) -> Prediction:
    """Predict ``config`` for a whole model of ``specs`` (built-in models give them, see
    :mod:`zeroexp.models.specs`)."""
    config = config.resolved()
    ranks = config.trainer.devices * config.trainer.num_nodes
    shards = _shard_size(config, ranks)
    compute = NAMES[config.precision.compute]
    stored = [
        replace(s.part(), dtype=_stored(s.dtype, compute), group=_group(config, s)) for s in specs
    ]
    layout = make_layout(stored, cut=config.zero.unit, shards=shards)
    comm = _traffic(config, layout, STAGES[config.zero.stage], ranks)
    moved, files = transfers(config, layout), file_traffic(config, layout)
    state = {}
    padding = {}
    for rank in range(ranks):
        state[rank], padding[rank] = _state(config, layout, rank)
    everyone = range(ranks)
    away = sum(leaving_segments(config, layout).values())
    return Prediction(
        state,
        padding,
        {r: dict(comm) for r in everyone},
        {r: dict(moved) for r in everyone},
        {r: dict(files) for r in everyone},
        away / max(1, sum(optimizer_shares(config, layout).values())),
    )


def _shard_size(config: Config, ranks: int) -> int:
    size = config.zero.shard_size
    if size == "node":
        return config.trainer.devices
    return size if isinstance(size, int) else ranks


def _stored(dtype: str, compute: str) -> str:
    floating = dtype.startswith(("float", "bfloat"))
    return compute if floating and compute != "float32" else dtype


def _group(config: Config, spec: ParamSpec) -> int:
    """The group that :func:`zeroexp.optim.build` puts a parameter in."""
    return int(not config.optim.decays(spec.name, len(spec.shape)))


def _state(config: Config, layout: Layout, rank: int) -> tuple[dict[str, dict[str, int]], int]:
    out = {kind: {tier.value: 0 for tier in Tier} for kind in ("params", "grads", "optim")}
    padding = 0

    def add(kind: str, segment: Segment, where: Placement, itemsize: int) -> None:
        nonlocal padding
        size = segment.shard_size if where.sharded else segment.size
        out[kind][where.tier.value] += size * itemsize
        gap = segment.padding_in(segment.index_of(rank)) if where.sharded else segment.padding
        padding += gap * itemsize

    for segment, home in zip(layout.segments, homes(config, layout), strict=True):
        sizes = formats(config, segment, home)
        # Integers have no NaN to stand for what is elsewhere: they stay, whole.
        params = home.params if is_floating(segment) else Placement(sharded=False)
        add("params", segment, params, sizes.param)
        if segment.trainable:
            add("grads", segment, home.grads, sizes.grad)
            if not home.grads.sharded and reductions(config) > 1:
                # sums of earlier micro-batches
                add("grads", segment, Placement(sharded=True), sizes.grad)
            add("optim", segment, home.optim, sizes.optim)
    return out, padding


def _traffic(
    config: Config, layout: Layout, placement: StatePlacement, ranks: int
) -> dict[str, int]:
    micro = config.trainer.accumulate_grad_batches
    total = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    total["all_to_all"] = all_to_all_bytes(config)
    for unit in layout.units:
        for segment in unit.segments:
            sizes = formats(config, segment, placement)
            share = (segment.shards - 1) * segment.shard_size
            replicas = ranks // (segment.spread * segment.shards)
            if placement.params.sharded and is_floating(segment):
                total["all_gather"] += share * sizes.param * micro * gathers(config, unit.name)
            if not segment.trainable:
                continue
            total["reduce_scatter"] += share * sizes.wire * reductions(config)
            if not placement.params.sharded and placement.optim.sharded:
                total["all_gather"] += share * sizes.param
            elif not placement.optim.sharded:
                total["all_gather"] += share * sizes.grad
            if replicas > 1:
                total["all_reduce"] += (replicas - 1) * segment.shard_size * sizes.grad
    return {op: n for op, n in total.items() if n}
