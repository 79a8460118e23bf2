"""What zeroexp set out to reach, each held against a result. A target whose peer or whose own mode
did not run is not met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.summary import LOSS_TOLERANCE, Spread, WorkResult
from benchmarks.timings import Timings

# Bytes per parameter of float32 parameters, gradients and AdamW state, by stage, for N ranks: 4 + 4
# + 8, each divided by N from the stage on that shards it (Rajbhandari et al., ZeRO, 2020, section
# 5, with 4-byte gradients and parameters).
# Each stage maps to (held whole, divided by N).
STATE_BYTES = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}


@dataclass(frozen=True)
class Verdict:
    """One line of the list of targets. ``measured`` is None where something is missing."""

    text: str
    measured: str | None
    met: bool

    @property
    def status(self) -> str:
        if self.measured is None:
            return "missing"
        return "met" if self.met else "not met"


def shown(spread: Spread) -> str:
    """Median and extremes of a ratio."""
    return f"{spread.median:.3f} ({spread.low:.3f}..{spread.high:.3f})"


def step_time(
    results: Mapping[str, WorkResult], work: str, mode: str, peer: str, limit: float
) -> Verdict:
    """Step time at most ``limit`` of a peer's on work on which both compute the same losses."""
    text = f"{work}: step time of {mode} at most {limit:g}x of {peer}"
    result = results.get(work)
    ratio = result.ratio(mode, peer) if result else None
    difference = result.loss_difference(mode, peer) if result else None
    if ratio is None or difference is None:
        return Verdict(text, None, False)
    if difference > LOSS_TOLERANCE:
        return Verdict(text, f"losses differ by {difference:.1e}", False)
    return Verdict(text, shown(ratio), ratio.median <= limit)


def state_bytes(results: Mapping[str, WorkResult], work: str, stage: int) -> Verdict:
    """State of all ranks, counted on live storages, equals the formula to the byte once padding is
    taken off."""
    text = f"{work}: live state of zx{stage} equals the formula"
    result = results.get(work)
    ranks = result.memory(f"zx{stage}") if result else None
    if result is None or ranks is None:
        return Verdict(text, None, False)
    padding = sum(rank["padding"] for rank in ranks)
    found = sum(rank["state"] for rank in ranks) - padding
    whole, divided = STATE_BYTES[stage]
    expected = result.num_params * (whole * len(ranks) + divided)
    measured = f"{found} of {expected} B over {len(ranks)} ranks, and {padding} B padding"
    return Verdict(text, measured, found == expected)


def peak(results: Mapping[str, WorkResult], work: str, mode: str, peer: str) -> Verdict:
    """Peak resident set above the baseline at most a peer's."""
    text = f"{work}: peak memory of {mode} at most that of {peer}"
    result = results.get(work)
    ours = result.peak_bytes_per_param(mode) if result else None
    theirs = result.peak_bytes_per_param(peer) if result else None
    if ours is None or theirs is None:
        return Verdict(text, None, False)
    return Verdict(text, f"{ours:.2f} against {theirs:.2f} B/param", ours <= theirs)


def training(results: Mapping[str, WorkResult]) -> list[Verdict]:
    """All targets on the three works."""
    verdicts = []
    for work, ddp_limit in (("gpt10", 1.05), ("mlp", 1.15), ("gpt125", 1.15)):
        for stage in (1, 2):
            verdicts.append(step_time(results, work, f"zx{stage}", "ddp", ddp_limit))
            verdicts.append(step_time(results, work, f"zx{stage}", f"ds{stage}", 0.8))
        verdicts.append(step_time(results, work, "zx3", "fsdp", 0.85))
        verdicts.append(step_time(results, work, "zx3", "ds3", 0.75))
        verdicts += [state_bytes(results, work, stage) for stage in range(4)]
        verdicts.append(peak(results, work, "zx3", "fsdp"))
    return verdicts


def speed_up(
    timings: Timings | None,
    case: str,
    variant: str,
    over: str,
    at_least: float,
    subject: str = "kernel",
) -> Verdict:
    """Speed of a variant at least ``at_least`` times that of another, in one case."""
    text = f"{subject}, {case}: {variant} at least {at_least:g}x as fast as {over}"
    ratio = timings.ratio(case, over, variant) if timings else None
    if ratio is None:
        return Verdict(text, None, False)
    return Verdict(text, shown(ratio), ratio.median >= at_least)


def kernel(timings: Timings | None) -> list[Verdict]:
    """The kernel on the memory that a shard lies in (huge pages), against its limit and torch's."""
    verdicts = []
    flat = next((name for name in timings.cases if name.startswith("flat")), "") if timings else ""
    flat = flat.partition(",")[0] or "flat"
    for threads in ("1 thread", "2 threads"):
        verdicts += [
            speed_up(timings, f"{flat}, {threads}", "zeroexp huge", "floor huge", 0.9),
            speed_up(timings, f"GPT shapes, {threads}", "zeroexp huge", "torch fused", 1.25),
            speed_up(
                timings,
                f"{flat}, {threads}",
                "zeroexp huge + bf16 copy",
                "torch fused + copy_",
                1.2,
            ),
        ]
    return verdicts


def overhead(timings: Timings | None, works: Mapping[str, WorkResult]) -> list[Verdict]:
    """Python time of a step with 100 units against a whole step of gpt10 at the same stage."""
    verdicts = []
    for kind in ("transformer blocks", "linear layers"):
        for stage in (1, 2, 3):
            text = f"Python overhead of zx{stage} at 100 units ({kind}) under 3% of a gpt10 step"
            extra = (
                timings.difference(f"{kind}, stage {stage}", "zeroexp", "module alone")
                if timings
                else None
            )
            step = works["gpt10"].step_seconds(f"zx{stage}") if "gpt10" in works else None
            if extra is None or step is None:
                verdicts.append(Verdict(text, None, False))
                continue
            share = extra.median / 1e3 / step.median
            measured = f"{extra.median:.1f} ms of {step.median * 1e3:.0f} ms, {share:.1%}"
            verdicts.append(Verdict(text, measured, share < 0.03))
    return verdicts


def startup(timings: Timings | None) -> list[Verdict]:
    """Launch to first step of the driver against Lightning's launcher and against torchrun."""
    case = "launch to first step"
    verdicts = []
    for against, allowed in (("Lightning DDP", 0.0), ("torchrun", 0.5)):
        text = f"launch to first step of the driver at most {allowed:g} s after {against}"
        extra = timings.difference(case, "driver", against) if timings else None
        if extra is None:
            verdicts.append(Verdict(text, None, False))
        else:
            measured = f"{extra.median:+.2f} s ({extra.low:+.2f}..{extra.high:+.2f})"
            verdicts.append(Verdict(text, measured, extra.median <= allowed))
    return verdicts


def compose(timings: Timings | None) -> list[Verdict]:
    """Composing and reporting without torch, median of fresh processes."""
    verdicts = []
    for variant in ("plan", "explain", "a wrong key"):
        text = f"command to answer: {variant} within 1 s, without torch"
        found = timings.median("command to answer", variant) if timings else None
        measured = None if found is None else f"{found:.2f} s"
        verdicts.append(Verdict(text, measured, found is not None and found <= 1.0))
    return verdicts


def file_engine(timings: Timings | None) -> list[Verdict]:
    """Transfers past the page cache against the best of what else can make them, and DeepSpeed's
    own buffers."""
    ours, peer = "zeroexp io_uring", "DeepSpeed, its pinned buffer"
    return [
        *(_best_rate(timings, case, ours, 0.95) for case in ("read", "write")),
        speed_up(timings, "read", ours, peer, 1.15, "file engine"),
        speed_up(timings, "write", ours, peer, 1.0, "file engine"),
    ]


def _best_rate(timings: Timings | None, case: str, ours: str, at_least: float) -> Verdict:
    """The contender with the least median counts; without the bare loop there is no limit."""
    loop = "io_uring loop"
    others = (loop, "DeepSpeed, its pinned buffer", "DeepSpeed, caller's tensor", "fio")
    text = f"file engine, {case}: {ours} at least {at_least:g}x as fast as any other"
    found = {name: timings.median(case, name) for name in others} if timings else {}
    ran = {name: value for name, value in found.items() if value is not None}
    best = min(ran, key=ran.__getitem__) if loop in ran else None
    ratio = timings.ratio(case, best, ours) if timings and best else None
    if ratio is None:
        return Verdict(text, None, False)
    return Verdict(text, f"{shown(ratio)} of {best}", ratio.median >= at_least)
