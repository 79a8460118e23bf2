"""The dynamic loss scale against DeepSpeed's published sequences and cases LS-01, LS-02."""

from __future__ import annotations

from typing import Any

import pytest

from zeroexp.config.sections.precision import LossScaleConfig
from zeroexp.errors import NonFiniteError
from zeroexp.precision import LossScale


def scaler(**keys: Any) -> LossScale:
    return LossScale(LossScaleConfig(mode="dynamic", **keys), dynamic=True, active=True)


def after(scale: LossScale, overflows: list[bool]) -> list[float]:
    out = []
    for overflow in overflows:
        scale.update(overflow)
        out.append(scale.value)
    return out


def test_growth_doubles_on_steps_3_5_7_9() -> None:
    """deepspeed.md 3.D case 70: first doubling on clean step interval + 1."""
    found = after(scaler(init=256.0, interval=2, hysteresis=1), [False] * 10)
    assert found == [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]


@pytest.mark.parametrize(("floor", "wanted"), [(1.0, [8, 4, 2, 1]), (2.0, [8, 4, 2])])
def test_backoff_halves_to_the_floor_and_then_stops(floor: float, wanted: list[float]) -> None:
    """deepspeed.md 3.D case 71, cases LS-01: never an endless silent loop."""
    scale = scaler(init=16.0, hysteresis=1, floor=floor)
    assert after(scale, [True] * len(wanted)) == wanted
    with pytest.raises(NonFiniteError, match=r"floor.*layer\.weight"):
        scale.update(True, culprit="layer.weight")


def test_ls_01_hysteresis_is_used_up_before_the_first_halving() -> None:
    scale = scaler(init=65536.0, hysteresis=2)
    found = after(scale, [True] * 17)
    assert found == [2.0**16, *(2.0**k for k in range(15, -1, -1))]
    with pytest.raises(NonFiniteError):
        scale.update(True)


def test_ls_02_two_overflows_then_good_steps() -> None:
    scale = scaler(init=16.0, hysteresis=1, interval=1000)
    assert after(scale, [True, True] + [False] * 998) == [8.0, 4.0] + [4.0] * 998


def test_an_overflow_restarts_the_interval() -> None:
    scale = scaler(init=256.0, interval=2, hysteresis=1)
    pattern = [False, False, True, False, False, False, False]
    assert after(scale, pattern) == [256, 256, 128, 128, 128, 256, 256]


def test_growth_refills_the_hysteresis() -> None:
    scale = scaler(init=4.0, interval=1, hysteresis=2)
    assert after(scale, [True, False, False, True, True]) == [4, 4, 8, 8, 4]


def test_static_and_off_do_not_move() -> None:
    static = LossScale(LossScaleConfig(init=8.0), dynamic=False, active=True)
    assert after(static, [True, False, True]) == [8.0, 8.0, 8.0]
    assert LossScale(LossScaleConfig(), dynamic=False, active=False).value == 1.0


def test_state_survives() -> None:
    first = scaler(init=16.0, interval=3)
    after(first, [True, False, False])
    second = scaler(init=1.0, interval=3)
    second.load_state_dict(first.state_dict())
    pattern = [False, False, True, True, False]
    assert after(first, pattern) == after(second, pattern)
