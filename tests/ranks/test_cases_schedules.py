"""Learning-rate schedules of one or two steps: cases reported against other systems.

The ids name published cases; values come from their text.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroexp.optim.schedules import SHAPES


def rates(kind: str, warmup: int, total: int, floor: float, steps: int) -> list[float]:
    """The learning rate before each step under torch's scheduler, from a peak of 0.5."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    shape = SHAPES[kind]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: shape(at, warmup, total, floor)
    )
    out = [scheduler.get_last_lr()[0]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        out.append(scheduler.get_last_lr()[0])
    return out


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["constant", "linear", "warmup_cosine", "inverse_sqrt"])
def test_op07_short_schedules(kind, warmup, total):
    """OP-07, deepspeed 3.G 106: from 0 (without warm-up: the peak) to the peak to the floor."""
    found = rates(kind, warmup, total, 0.1, 6)
    assert all(0 <= rate <= 0.5 for rate in found)
    assert found[0] == pytest.approx(0.0 if warmup else 0.5)
    falls = kind in ("linear", "warmup_cosine")
    if total > warmup or not falls:
        assert found[warmup] == pytest.approx(0.5)
    if falls:
        assert found[total] == found[-1] == pytest.approx(0.05)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)])
def test_op07_short_cycles(warmup, total):
    """OP-07: one_cycle goes from the floor to the peak and back, whatever its lengths."""
    found = rates("one_cycle", warmup, total, 0.1, 6)
    assert found[0] == found[-1] == pytest.approx(0.05)
    assert max(found) == found[max(1, warmup)] == pytest.approx(0.5)
