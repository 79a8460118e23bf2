"""Learning rates over the steps: pure functions of the step, wrapped in torch's scheduler.

A schedule is a factor on the peak learning rate. It counts applied steps only: a skipped step does
not advance it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zeroexp.config.sections.schedule import ScheduleConfig


def constant(step: int, warmup: int, total: int, floor: float) -> float:
    """Linear rise over ``warmup`` steps, then 1."""
    return _rise(step, warmup)


def linear(step: int, warmup: int, total: int, floor: float) -> float:
    """Linear rise, then linear fall from 1 to ``floor`` at ``total``."""
    if step < warmup:
        return _rise(step, warmup)
    return floor + (1 - floor) * (1 - _progress(step, warmup, total))


def warmup_cosine(step: int, warmup: int, total: int, floor: float) -> float:
    """Linear rise, then half a cosine from 1 to ``floor`` at ``total`` (Loshchilov and Hutter,
    arXiv:1608.03983)."""
    if step < warmup:
        return _rise(step, warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, total)))


def inverse_sqrt(step: int, warmup: int, total: int, floor: float) -> float:
    """Linear rise, then ``sqrt(warmup / step)`` (Vaswani et al., arXiv:1706.03762, equation 3), not
    below ``floor``."""
    if step < warmup:
        return _rise(step, warmup)
    return max(floor, math.sqrt(max(1, warmup) / max(1, step)))


def one_cycle(step: int, warmup: int, total: int, floor: float) -> float:
    """Linear from ``floor`` to 1 over ``warmup`` steps (half of ``total`` when 0), back over as
    many, then ``floor`` (Smith, arXiv:1708.07120)."""
    size = max(1, warmup or total // 2)
    distance = min(1.0, abs(step - size) / size)
    return floor + (1 - floor) * (1 - distance)


def _rise(step: int, warmup: int) -> float:
    return step / warmup if step < warmup else 1.0


def _progress(step: int, warmup: int, total: int) -> float:
    """How far ``step`` is between ``warmup`` and ``total``, in [0, 1]; the end when there is
    nothing between."""
    return min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0


SHAPES: Mapping[str, Callable[[int, int, int, float], float]] = {
    "constant": constant,
    "linear": linear,
    "warmup_cosine": warmup_cosine,
    "inverse_sqrt": inverse_sqrt,
    "one_cycle": one_cycle,
}


def schedule(config: ScheduleConfig, optimizer: Optimizer, max_steps: int) -> LambdaLR:
    """The scheduler that the ``schedule`` section describes; call its ``step()`` once per applied
    step.

    ``max_steps`` is where the schedule ends unless ``total_steps`` says otherwise.
    """
    shape, warmup, floor = SHAPES[config.kind], config.warmup_steps, config.min_ratio
    total = config.total_steps or max(1, max_steps)
    return LambdaLR(optimizer, lambda step: shape(step, warmup, total, floor))
