"""Time, memory and efficiency of training steps, without Lightning and without torch.

Seconds, bytes, tokens and FLOP throughout; what is unknown is None.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps after the warm-up: ``n`` of them; None where there was none."""

    median: float | None
    p95: float | None
    n: int
    #: tokens of all ranks per second over those steps, pauses left out
    tokens_per_s: float | None


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of ``values`` lie, between neighbours by linear
    interpolation (R type 7).
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class StepClock:
    """Times optimizer steps from end to end, with what is not training (validation, checkpoints)
    taken out.

    A step is one update of the weights, so with accumulation it spans several micro-batches, and
    its tokens are those of all of them on all ranks.
    """

    def __init__(self, warmup_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._warmup = warmup_steps
        self._clock = clock
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._since: float | None = None  # start of the step that is under way
        self._paused_at: float | None = None
        self._left_out = 0.0
        #: whether the last step had no pause in it
        self.undisturbed = True

    @property
    def steps(self) -> int:
        """Steps that have ended, warm-up included."""
        return len(self._seconds)

    def start(self) -> None:
        """The first step begins now."""
        self._since = self._clock()
        self._left_out = 0.0
        self._paused_at = None

    def pause(self) -> None:
        """Something that is not training begins; a second call before :meth:`resume` changes
        nothing.
        """
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._left_out += self._clock() - self._paused_at
            self._paused_at = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The body is not training."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def end_step(self, tokens: int) -> float:
        """A step with ``tokens`` tokens over all ranks has ended; its seconds. The next one begins
        now.
        """
        if self._since is None:
            raise RuntimeError("end_step() before start()")
        self.resume()
        now = self._clock()
        seconds = now - self._since - self._left_out
        self._seconds.append(seconds)
        self._tokens.append(tokens)
        self.undisturbed = self._left_out == 0.0
        self._since, self._left_out = now, 0.0
        return seconds

    def recent_tokens_per_s(self, steps: int) -> float | None:
        """Tokens of all ranks per second over the last ``steps`` steps; steps of the warm-up count
        as well.
        """
        return _rate(self._tokens[-steps:], self._seconds[-steps:]) if steps > 0 else None

    def recent_seconds(self, steps: int) -> float | None:
        """Seconds of the last ``steps`` steps together."""
        return sum(self._seconds[-steps:]) if steps > 0 and self._seconds else None

    def times(self) -> StepTimes:
        """The figures of a result: every step but the first ``warmup_steps``."""
        seconds = self._seconds[self._warmup :]
        if not seconds:
            return StepTimes(None, None, 0, None)
        rate = _rate(self._tokens[self._warmup :], seconds)
        return StepTimes(statistics.median(seconds), percentile(seconds, 0.95), len(seconds), rate)


def _rate(tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    total, time_taken = sum(tokens), sum(seconds)
    return total / time_taken if total and time_taken > 0 else None


@dataclass(frozen=True)
class PeakFlops:
    """FLOP per second that the hardware of all ranks could reach, and the words that say how it is
    derived.
    """

    value: float | None
    assumption: str


# Dense tensor-core bf16/fp16 and plain fp32 peaks per device from NVIDIA's data sheets, in FLOP/s
# (no sparsity, no TF32).
_GPU_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("V100", 125e12, 15.7e12),
)


def gpu_peak(name: str, precision: str, ranks: int) -> PeakFlops:
    """Peak of ``ranks`` devices called ``name`` for ``precision`` (fp32, bf16, fp16); unknown for
    other devices.
    """
    for known, low, single in _GPU_PEAKS:
        if all(word in name for word in known.split()):
            each = {"fp32": single, "bf16": low, "fp16": low}.get(precision)
            if each is None:
                break
            return PeakFlops(
                each * ranks, f"{ranks} x {each:.3g} FLOP/s ({known} data sheet, dense {precision})"
            )
    return PeakFlops(None, f"no peak known for {name} in {precision}")


def cpu_peak(
    flags: frozenset[str], hertz: float | None, threads: int, cores: int, precision: str
) -> PeakFlops:
    """Peak of the ``min(threads, cores)`` cores that all ranks together keep busy.

    Assumes two FMA units per core (AVX-512 or AVX2, else one SSE multiply and one add) at the clock
    rate ``hertz``. bf16 and fp16 count as fp32 unless the CPU multiplies bf16 natively
    (AVX512-BF16: twice; AMX: 2048 per cycle).
    """
    if hertz is None:
        return PeakFlops(None, "the clock rate of the CPU is unknown")
    if precision == "bf16" and "amx_bf16" in flags:
        per_cycle, unit = 2048, "AMX bf16"
    elif "avx512f" in flags:
        per_cycle, unit = 64, "AVX-512, 2 FMA units"
        if precision == "bf16" and "avx512_bf16" in flags:
            per_cycle, unit = 128, "AVX512-BF16, 2 units"
    elif "avx2" in flags and "fma" in flags:
        per_cycle, unit = 32, "AVX2, 2 FMA units"
    else:
        per_cycle, unit = 8, "SSE"
    if precision == "fp64":
        per_cycle //= 2
    busy = min(threads, cores)
    text = f"{busy} cores x {hertz / 1e9:.2f} GHz x {per_cycle} FLOP per cycle ({unit})"
    return PeakFlops(busy * hertz * per_cycle, text)


def mfu(
    flops_per_token: int | None, rule: str, tokens_per_s: float | None, peak: PeakFlops
) -> dict[str, float | str | None]:
    """``{value, peak_flops, formula}``: model FLOPs utilisation, the fraction of the assumed peak
    that the model's own arithmetic reaches.

    ``flops_per_token`` (forward and backward) follows ``rule``, which is printed beside the value;
    ``tokens_per_s`` counts the tokens of all ranks and ``peak`` the hardware of all ranks.
    """
    value = None
    if flops_per_token is not None and tokens_per_s is not None and peak.value:
        value = flops_per_token * tokens_per_s / peak.value
    known = f"{flops_per_token:,}" if flops_per_token is not None else "unknown"
    formula = f"{known} FLOP per token x tokens_per_s / peak_flops; {rule}; peak: {peak.assumption}"
    return {"value": value, "peak_flops": peak.value, "formula": formula}
