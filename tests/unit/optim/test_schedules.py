"""Learning rates by their formulas, and the corners of cases OP-07."""

from __future__ import annotations

import math

import pytest
import torch

from zeroexp.config.sections.schedule import ScheduleConfig
from zeroexp.optim.schedules import SHAPES, schedule


def rates(kind: str, steps: int, **keys: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = schedule(ScheduleConfig(kind=kind, **keys), optimizer, max_steps=10)  # type: ignore[arg-type]
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def test_constant_with_warmup() -> None:
    assert rates("constant", 5, warmup_steps=4) == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_linear_ends_at_the_floor() -> None:
    found = rates("linear", 12, warmup_steps=2, min_ratio=0.1)
    assert found[:3] == [0.0, 1.0, 2.0]
    assert found[6] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert found[10] == found[11] == pytest.approx(0.2)


def test_warmup_cosine() -> None:
    found = rates("warmup_cosine", 11, warmup_steps=2, min_ratio=0.5)
    assert found[2] == 2.0
    assert found[6] == pytest.approx(2 * (0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi / 2))))
    assert found[10] == pytest.approx(1.0)


def test_inverse_sqrt() -> None:
    found = rates("inverse_sqrt", 17, warmup_steps=4)
    assert found[4] == 2.0 and found[16] == pytest.approx(1.0)


def test_one_cycle() -> None:
    """lr[0] = min, lr[size] = max, then back (deepspeed.md 3.G case 106)."""
    found = rates("one_cycle", 11, warmup_steps=4, min_ratio=0.25)
    assert found[0] == 0.5 and found[4] == 2.0 and found[8] == found[10] == 0.5
    assert found[2] == pytest.approx(1.25)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("extra", [0, 1])
def test_op_07_no_corner_divides_by_zero(kind: str, warmup: int, extra: int) -> None:
    factors = [SHAPES[kind](s, warmup, warmup + extra, 0.5) for s in range(6)]
    assert all(math.isfinite(f) and 0 <= f <= 1 for f in factors)
    if warmup == 0 and extra == 1 and kind != "one_cycle":
        assert factors[0] == 1.0
