"""Step times, percentiles and MFU against numbers worked out by hand."""

from __future__ import annotations

import statistics

import pytest

from zeroexp.run.measure import PeakFlops, StepClock, cpu_peak, gpu_peak, mfu, percentile


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_samples_per_second_count_every_micro_batch() -> None:
    """TL-01."""
    # Micro-batch 2, accumulation 4, 2 ranks, 50 ms a micro-batch: 16 sequences in 0.2 s.
    time = FakeClock()
    clock = StepClock(warmup_steps=0, clock=time)
    clock.start()
    for _ in range(10):
        for _ in range(4):
            time.now += 0.05
        clock.end_step(tokens=2 * 4 * 2)
    times = clock.times()
    assert times.n == 10
    assert times.tokens_per_s == pytest.approx(80.0)
    assert times.median == pytest.approx(0.2)


def test_warm_up_and_pauses_are_left_out() -> None:
    time = FakeClock()
    clock = StepClock(warmup_steps=2, clock=time)
    clock.start()
    for seconds in (10.0, 5.0, 1.0, 2.0, 3.0):
        time.now += seconds / 2
        clock.pause()
        clock.pause()  # validation inside a pause for a checkpoint
        time.now += 100.0
        clock.resume()
        time.now += seconds / 2
        assert clock.end_step(tokens=6) == pytest.approx(seconds)
    times = clock.times()
    assert (times.median, times.n) == (pytest.approx(2.0), 3)
    assert times.tokens_per_s == pytest.approx(18 / 6.0)
    assert clock.recent_tokens_per_s(1) == pytest.approx(6 / 3.0)
    assert clock.recent_tokens_per_s(99) == pytest.approx(30 / 21.0)


def test_a_step_with_a_pause_in_it_says_so() -> None:
    now = iter(range(100))
    clock = StepClock(0, clock=lambda: float(next(now)))
    clock.start()
    said = []
    for pauses in (False, True, False):
        if pauses:
            with clock.paused():
                pass
        clock.end_step(1)
        said.append(clock.undisturbed)
    assert said == [True, False, True]


def test_a_pause_between_steps_belongs_to_no_step() -> None:
    time = FakeClock()
    clock = StepClock(warmup_steps=0, clock=time)
    clock.start()
    time.now += 1.0
    clock.end_step(1)
    clock.pause()
    time.now += 50.0
    clock.resume()
    time.now += 2.0
    assert clock.end_step(1) == pytest.approx(2.0)


def test_a_run_shorter_than_the_warm_up_has_no_figures() -> None:
    time = FakeClock()
    clock = StepClock(warmup_steps=5, clock=time)
    clock.start()
    time.now += 1.0
    clock.end_step(10)
    times = clock.times()
    assert (times.median, times.p95, times.n, times.tokens_per_s) == (None, None, 0, None)


def test_step_before_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before start"):
        StepClock(0).end_step(1)


def test_percentile_agrees_with_the_inclusive_method_of_statistics() -> None:
    values = [0.3, 0.1, 0.7, 0.2, 0.9, 0.4, 0.6]
    expected = statistics.quantiles(values, n=20, method="inclusive")[18]
    assert percentile(values, 0.95) == pytest.approx(expected)
    assert percentile([5.0], 0.95) == 5.0


def test_mfu_is_model_flops_over_assumed_peak() -> None:
    """TL-02."""
    # A Linear(100, 100): 20,000 FLOP forward a sample, three times that with backward; 1,000
    # samples a second on a machine of 1.2e9 FLOP/s use 5 % of it.
    figure = mfu(60_000, "3 x forward", 1000.0, PeakFlops(1.2e9, "test machine"))
    assert figure["value"] == pytest.approx(0.05)
    assert figure["peak_flops"] == 1.2e9
    assert "60,000 FLOP per token" in str(figure["formula"])
    assert "3 x forward" in str(figure["formula"]) and "test machine" in str(figure["formula"])


def test_unknown_peak_or_speed_gives_no_mfu() -> None:
    assert mfu(100, "", 5.0, PeakFlops(None, "?"))["value"] is None
    assert mfu(100, "", None, PeakFlops(1.0, "?"))["value"] is None
    assert mfu(None, "", 5.0, PeakFlops(1.0, "?"))["value"] is None


def test_cpu_peak_counts_busy_cores_lanes_and_fused_operations() -> None:
    avx2 = frozenset({"avx2", "fma"})
    # 8 fp32 lanes x 2 units x 2 operations of an FMA
    assert cpu_peak(avx2, 2e9, 4, 8, "fp32").value == 4 * 2e9 * 32
    assert cpu_peak(avx2, 2e9, 16, 8, "fp32").value == 8 * 2e9 * 32
    assert cpu_peak(avx2, 2e9, 4, 8, "fp64").value == 4 * 2e9 * 16
    wide = avx2 | {"avx512f"}
    assert cpu_peak(wide, 2e9, 1, 1, "bf16").value == 2e9 * 64
    assert cpu_peak(wide | {"avx512_bf16"}, 2e9, 1, 1, "bf16").value == 2e9 * 128
    assert cpu_peak(avx2, None, 1, 1, "fp32").value is None


def test_gpu_peaks_come_from_the_data_sheet_or_stay_unknown() -> None:
    assert gpu_peak("NVIDIA A100-SXM4-80GB", "bf16", 4).value == 4 * 312e12
    assert gpu_peak("NVIDIA H100 PCIe", "bf16", 1).value == 756e12
    assert gpu_peak("NVIDIA H200", "fp32", 2).value == 2 * 67e12
    assert gpu_peak("NVIDIA Quadro 600", "bf16", 1).value is None


def test_a_pipeline_of_gpus_has_the_peak_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of its data ranks alone: their tokens are worked on by every stage."""
    import torch

    from zeroexp.config import Config
    from zeroexp.run.training import _peak

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    keys = {"trainer.accelerator": "gpu", "trainer.devices": 4, "precision.compute": "bf16"}
    config = Config.from_mapping({**keys, "pipeline.schedule": "1f1b", "pipeline.stages": 2})
    assert _peak(config).value == 4 * 989e12
