"""Dynamic and static loss scale: cases that users of other systems reported.

The ids name the published case; values come from its text or from plain torch in one process.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from small import STAGES, Scalar, caught, furthest, settings, sgd_engine, step, weights
from torch import Tensor, nn

import zeroexp

RANKS = (1, 2)


class Exploding(nn.Module):
    """A linear layer whose forward multiplies by 1e30, so that every fp16 gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1e30


def overflow_until_stopped(stage: int) -> dict[str, Any]:
    module = Exploding().half()
    before = weights(module)
    keys = {"compute": "fp16", "scale_init": 65536.0, "scale_hysteresis": 2, "scale_floor": 1.0}
    engine = sgd_engine(module, stage, **keys)
    scales, error = [], ("", "")
    for _ in range(20):
        engine.backward(engine(torch.ones(1, 4)).sum())
        error = caught(engine.step)
        if error[0]:
            break
        scales.append(float(engine.loss_scale))
    with zeroexp.gathered(module):
        moved = furthest(weights(module), before)
    return {"scales": scales, "error": error, "skipped": engine.skipped_steps, "moved": moved}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_ls01_endless_overflow_stops_at_the_floor(ranks, stage, num_ranks):
    """LS-01: 65536 (hysteresis), 32768, ..., 1, then a named error; no weight has moved."""
    for found in ranks(num_ranks)(overflow_until_stopped, stage):
        assert found["scales"] == [65536.0 / 2**k for k in range(17)]
        kind, message = found["error"]
        assert kind == "NonFiniteError"
        assert "layer.weight" in message or "layer.bias" in message
        assert re.search(r"\b1(\.0)?\b", message) and "floor" in message
        assert found["skipped"] == 17 and found["moved"] == 0


def overflow_at(stage: int, bad: list[int], steps: int, keys: dict[str, Any]) -> dict[str, Any]:
    engine = sgd_engine(Scalar(1.0, dtype=torch.float16), stage, compute="fp16", **keys)
    good = 2.0**-14  # small, so that no scale of these tests makes it overflow in fp16
    scales = [step(engine, float("inf") if i in bad else good) for i in range(steps)]
    return {"scales": scales, "skipped": engine.skipped_steps, "steps": engine.global_steps}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_ls02_scale_after_two_overflows(ranks, stage, num_ranks):
    """LS-02: 16 -> 8 -> 4 at every stage, then 4; each overflow is reported once, by rank 0."""
    run = ranks(num_ranks)
    steps = 1000 if num_ranks == 1 and stage == 0 else 40
    keys = {"scale_init": 16.0, "scale_hysteresis": 1, "scale_interval": 1000}
    for found in run(overflow_at, stage, [0, 1], steps, keys):
        assert found["scales"] == [8.0] + [4.0] * (steps - 1)
        assert found["skipped"] == 2 and found["steps"] == steps
    told = [re.findall(r"16\D+8\b|\b8\D+4\b", text) for text in run.output]
    assert len(told[0]) == 2, run.output[0]
    assert all(not others for others in told[1:])


@pytest.mark.parametrize("stage", STAGES)
def test_ds70_the_scale_doubles_after_the_window(ranks, stage):
    """deepspeed 3.D 70: init 256, window 2: doubles on steps 3, 5, 7, 9."""
    keys = {"scale_init": 256.0, "scale_hysteresis": 1, "scale_interval": 2}
    wanted = [256.0, 256.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0]
    for found in ranks(2)(overflow_at, stage, [], 10, keys):
        assert found["scales"] == wanted and found["skipped"] == 0


def reference_scaler(
    bad: list[int],
    steps: int,
    init: float,
    window: int,
    hysteresis: int,
    growth: float = 2.0,
    backoff: float = 0.5,
    floor: float = 1.0,
) -> list[float]:
    """deepspeed 2.6, in its own words: iterations from 0, the last overflow at -1."""
    scale, last, left, out = init, -1, hysteresis, []
    for i in range(steps):
        if i in bad:
            if hysteresis == 1 or left == 1:
                scale = max(scale * backoff, floor)
            else:
                left -= 1
            last = i
        else:
            stable = i - last - 1
            if stable > 0 and stable % window == 0:
                left = hysteresis
                scale *= growth
        out.append(scale)
    return out


@pytest.mark.parametrize(
    ("bad", "window", "hysteresis"),
    [
        ([], 3, 2),
        ([0], 3, 2),
        ([0, 1, 2], 3, 2),
        ([4, 5, 12, 13, 20], 3, 2),
        ([0, 1, 9, 10, 11, 25], 4, 3),
        ([2, 4, 6, 8, 10, 12], 1, 1),
        ([7, 8, 15, 16, 23], 2, 4),
    ],
)
def test_ds26_sequence_of_scales(ranks, bad, window, hysteresis):
    """deepspeed 2.6: hysteresis is used up, stays so, and refills only on growth."""
    keys = {"scale_init": 64.0, "scale_interval": window, "scale_hysteresis": hysteresis}
    wanted = reference_scaler(bad, 30, 64.0, window, hysteresis)
    for found in ranks(2)(overflow_at, 2, bad, 30, keys):
        assert found["scales"] == wanted and found["skipped"] == len(bad)


def test_ds26_growth_and_backoff_are_what_they_say(ranks):
    """Factors other than two, with the floor in reach."""
    keys = {"scale_init": 100.0, "scale_interval": 2, "scale_hysteresis": 1}
    keys |= {"scale_growth": 4.0, "scale_backoff": 0.25, "scale_floor": 10.0}
    bad = [0, 6, 7]
    wanted = reference_scaler(bad, 12, 100.0, 2, 1, 4.0, 0.25, 10.0)
    assert ranks(1)(overflow_at, 1, bad, 12, keys)[0]["scales"] == wanted


@pytest.mark.parametrize("floor", [1.0, 2.0])
@pytest.mark.parametrize("stage", STAGES)
def test_ds71_all_overflow(ranks, stage, floor):
    """deepspeed 3.D 71: 16 -> 8 -> 4 -> 2 -> 1 (or the floor), parameters never change."""
    for found in ranks(2)(all_overflow, stage, floor):
        wanted = [16.0 / 2**k for k in range(1, 5) if 16.0 / 2**k >= floor]
        assert found == (wanted, "NonFiniteError", 1.0)


def all_overflow(stage: int, floor: float) -> tuple[list[float], str, float]:
    module = Scalar(1.0, dtype=torch.float16)
    keys = {"scale_init": 16.0, "scale_hysteresis": 1, "scale_floor": floor}
    engine = sgd_engine(module, stage, compute="fp16", **keys)
    scales: list[float] = []
    kind = ""
    while not kind and len(scales) < 10:
        engine.backward(engine(float("inf")))
        kind, _ = caught(engine.step)
        if not kind:
            scales.append(float(engine.loss_scale))
    with zeroexp.gathered(module):
        return scales, kind, float(module.w.detach())


def static_scale(stage: int) -> dict[str, Any]:
    module = Scalar(1.0, 2.0, dtype=torch.float16)
    engine = sgd_engine(module, stage, lr=1.0, compute="fp16", scale_mode="static", scale_init=8.0)
    scales = [step(engine, c) for c in (0.5, float("inf"), 0.5)]
    whole = engine.state_dict()
    return {"scales": scales, "skipped": engine.skipped_steps, "w": whole and whole["w"].tolist()}


@pytest.mark.parametrize("stage", STAGES)
def test_ds26_a_static_scale_is_inert_but_skips(ranks, stage):
    """deepspeed 2.6: a static scale never moves; an overflow still skips the step."""
    found = ranks(2)(static_scale, stage)
    assert [each["scales"] for each in found] == [[8.0] * 3] * 2
    assert found[0]["skipped"] == 1 and found[0]["w"] == [0.0, 1.0]


def growth_step(stage: int) -> list[float]:
    engine = sgd_engine(
        Scalar(4.0, dtype=torch.float16),
        stage,
        lr=1.0,
        compute="fp16",
        scale_init=4.0,
        scale_interval=1,
        scale_hysteresis=1,
    )
    out = []
    for _ in range(4):
        step(engine, 0.25)
        out.append(float(engine.grad_norm))
    whole = engine.state_dict()
    return [*out, float(whole["w"]) if whole else 3.0]


@pytest.mark.parametrize("stage", STAGES)
def test_ds27a_gradients_are_unscaled_by_the_scale_that_made_them(ranks, stage):
    """deepspeed 2.7 a: on a step where the scale grows the gradient is not halved."""
    for found in ranks(2)(growth_step, stage):
        assert found == [0.25] * 4 + [3.0]


def schedule_under_overflow(stage: int) -> dict[str, Any]:
    module = Scalar(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(t / 10, 1.0))
    config = settings(stage, compute="fp16", scale_init=16.0, scale_hysteresis=1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        engine, _, _, scheduler = zeroexp.initialize(
            model=module, optimizer=optimizer, config=config, scheduler=scheduler
        )
        rates = [scheduler.get_last_lr()[0]]
        for i in range(7):
            engine.backward(engine(float("inf") if i < 3 else 1.0))
            engine.step()
            rates.append(scheduler.get_last_lr()[0])
    return {
        "rates": rates,
        "warned": [str(w.message) for w in heard if "lr_sched" in str(w.message)],
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_ls04_schedule_waits_for_applied_steps(ranks, stage, num_ranks):
    """LS-04, deepspeed 3.D 74: warm-up 0 -> 0.1 over 10 steps, three skipped, four applied."""
    for found in ranks(num_ranks)(schedule_under_overflow, stage):
        assert found["rates"] == pytest.approx([0, 0, 0, 0, 0.01, 0.02, 0.03, 0.04], abs=1e-12)
        assert found["warned"] == []
