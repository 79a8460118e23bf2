"""Bytes per element of a segment's state, and how often its bytes move in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroexp.config import Config
from zeroexp.layout import ITEMSIZE, Segment
from zeroexp.placement import StatePlacement

NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_SLOTS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}
"""State tensors per parameter; momentum of sgd and rmsprop is one more."""


@dataclass(frozen=True)
class Formats:
    """Bytes per element of each kind of state. ``wire`` is that of a gradient on its way,
    ``copy`` that of the weights the optimizer steps where they are not the parameters themselves
    (0 where they are), ``slots`` that of all its other state."""

    param: int
    grad: int
    wire: int
    copy: int
    slots: int

    @property
    def optim(self) -> int:
        return self.copy + self.slots


def is_floating(segment: Segment) -> bool:
    return segment.dtype.startswith(("float", "bfloat"))


def formats(config: Config, segment: Segment, home: StatePlacement) -> Formats:
    """The formats of a segment that is at home at ``home``."""
    p = config.precision
    param = ITEMSIZE[segment.dtype]
    if segment.dtype == "float64":
        grad = wire = param
    else:
        grad, wire = ITEMSIZE[NAMES[p.accumulate]], ITEMSIZE[NAMES[p.reduce]]
    narrow = segment.dtype in ("bfloat16", "float16")
    pure = narrow and p.master == "none" and p.compute in ("bf16", "fp16")
    apart = param if home.separates_master else 0
    copy = 4 if narrow and not pure else apart
    per_slot = param if pure or not narrow else 4
    extra = int(config.optim.kind in ("sgd", "rmsprop") and config.optim.momentum > 0)
    slots = per_slot * (_SLOTS[config.optim.kind] + extra)
    return Formats(param, grad, wire, copy, slots)


@dataclass(frozen=True)
class UnitUse:
    """How often a step makes a unit ``whole`` on the device, where it is not, and has its gradients
    ``reduced``."""

    whole: int
    reduced: int


def reductions(config: Config) -> int:
    """Reductions of each gradient per step."""
    each = config.zero.reduce == "each"
    return config.trainer.accumulate_grad_batches * config.num_micro_batches if each else 1


def use_of(config: Config, unit: str) -> UnitUse:
    """Without a pipeline: whole in forward, and in backward unless it stayed so in between."""
    mode = config.zero.reshard_after_forward
    stays = mode == "false" or (mode == "auto" and unit == "")
    times = 1 if stays else 2
    return UnitUse(config.trainer.accumulate_grad_batches * times, reductions(config))
