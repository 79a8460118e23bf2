"""Resident state and traffic of one step, to the byte, from the layout.

Formulas: Rajbhandari et al., arXiv:1910.02054, sections 5 and 7, with the padding of
:mod:`zeroexp.layout` counted in and listed apart. Traffic is what a rank sends, ``(N-1)/N`` of each
padded tensor per collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroexp.config import Config
from zeroexp.layout import ITEMSIZE, Layout, ParamSpec, Segment, make_layout
from zeroexp.placement import STAGES, StatePlacement, Tier

_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_SLOTS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}
"""State tensors per parameter; momentum of sgd and rmsprop is one more."""


@dataclass(frozen=True)
class Prediction:
    """Bytes per rank. Keys are rank numbers, kinds, tiers and ops, as in ``result.json``."""

    state_bytes: dict[int, dict[str, dict[str, int]]]
    padding_bytes: dict[int, int]
    comm_bytes_per_step: dict[int, dict[str, int]]
    io_bytes_per_step: dict[int, dict[str, int]]

    def to_dict(self) -> dict[str, object]:
        """The same with string keys, as JSON has them."""
        return {
            name: {str(rank): value for rank, value in getattr(self, name).items()}
            for name in (
                "state_bytes",
                "padding_bytes",
                "comm_bytes_per_step",
                "io_bytes_per_step",
            )
        }

    def total(self, rank: int = 0) -> int:
        """All resident state bytes of ``rank``."""
        return sum(n for kind in self.state_bytes[rank].values() for n in kind.values())


@dataclass(frozen=True)
class _Formats:
    """Bytes per element of each kind of state."""

    param: int
    grad: int
    wire: int
    optim: int


def predict(config: Config, specs: Sequence[ParamSpec]) -> Prediction:
    """Predict ``config`` for a model of ``specs`` (built-in models give them, see
    :mod:`zeroexp.models.specs`)."""
    config = config.resolved()
    ranks = config.trainer.devices * config.trainer.num_nodes
    shards = _shard_size(config, ranks)
    compute = _NAMES[config.precision.compute]
    stored = [replace(s, dtype=_stored(s.dtype, compute), group=_group(config, s)) for s in specs]
    layout = make_layout(stored, cut=config.zero.unit, shards=shards)
    placement = STAGES[config.zero.stage]
    comm = _traffic(config, layout, placement, ranks // shards)
    state = {}
    padding = {}
    for rank in range(ranks):
        state[rank], padding[rank] = _state(config, layout, placement, rank % shards)
    everyone = range(ranks)
    return Prediction(
        state,
        padding,
        {r: dict(comm) for r in everyone},
        {r: {"read": 0, "written": 0} for r in everyone},
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
    return int(len(spec.shape) <= 1 and not config.optim.decay_norm_and_bias)


def _formats(config: Config, segment: Segment) -> _Formats:
    p = config.precision
    param = ITEMSIZE[segment.dtype]
    if segment.dtype == "float64":
        grad = wire = param
    else:
        grad, wire = ITEMSIZE[_NAMES[p.accumulate]], ITEMSIZE[_NAMES[p.reduce]]
    narrow = segment.dtype in ("bfloat16", "float16")
    pure = narrow and p.master == "none" and p.compute in ("bf16", "fp16")
    master = 4 if narrow and not pure else 0
    per_slot = param if pure or not narrow else 4
    extra = int(config.optim.kind in ("sgd", "rmsprop") and config.optim.momentum > 0)
    return _Formats(param, grad, wire, master + per_slot * (_SLOTS[config.optim.kind] + extra))


def _state(
    config: Config, layout: Layout, placement: StatePlacement, index: int
) -> tuple[dict[str, dict[str, int]], int]:
    out = {kind: {tier.value: 0 for tier in Tier} for kind in ("params", "grads", "optim")}
    padding = 0

    def add(kind: str, segment: Segment, sharded: bool, itemsize: int) -> None:
        nonlocal padding
        tier = getattr(placement, kind).tier.value
        out[kind][tier] += (segment.shard_size if sharded else segment.size) * itemsize
        padding += (segment.padding_in(index) if sharded else segment.padding) * itemsize

    for segment in layout.segments:
        formats = _formats(config, segment)
        floating = segment.dtype.startswith(("float", "bfloat"))
        add("params", segment, placement.params.sharded and floating, formats.param)
        if segment.trainable:
            add("grads", segment, placement.grads.sharded, formats.grad)
            if not placement.grads.sharded and _reductions(config) > 1:
                add("grads", segment, True, formats.grad)  # sums of earlier micro-batches
            add("optim", segment, placement.optim.sharded, formats.optim)
    return out, padding


def _reductions(config: Config) -> int:
    """Reductions of each gradient per step."""
    return config.trainer.accumulate_grad_batches if config.zero.reduce == "each" else 1


def _traffic(
    config: Config, layout: Layout, placement: StatePlacement, replicas: int
) -> dict[str, int]:
    micro = config.trainer.accumulate_grad_batches
    total = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for unit in layout.units:
        for segment in unit.segments:
            formats = _formats(config, segment)
            share = (layout.shards - 1) * segment.shard_size
            floating = segment.dtype.startswith(("float", "bfloat"))
            if placement.params.sharded and floating:
                total["all_gather"] += share * formats.param * micro * _gathers(config, unit.name)
            if not segment.trainable:
                continue
            total["reduce_scatter"] += share * formats.wire * _reductions(config)
            if not placement.params.sharded and placement.optim.sharded:
                total["all_gather"] += share * formats.param
            elif not placement.optim.sharded:
                total["all_gather"] += share * formats.grad
            if replicas > 1:
                total["all_reduce"] += (replicas - 1) * segment.shard_size * formats.grad
    return {op: n for op, n in total.items() if n}


def _gathers(config: Config, unit: str) -> int:
    """All-gathers of one unit per micro-batch: forward, and backward unless it stayed whole in
    between."""
    mode = config.zero.reshard_after_forward
    stays = mode == "false" or (mode == "auto" and unit == "")
    return 1 if stays else 2
