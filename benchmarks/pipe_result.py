"""What a result of :mod:`benchmarks.pipe` says: table, targets, and where the time of a measured
bubble goes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.summary import LOSS_TOLERANCE, Spread
from benchmarks.targets import Verdict, shown
from benchmarks.timings import Timings


@dataclass(frozen=True)
class Variant:
    """One system. ``times``: the cases it has a row in."""

    module: str
    times: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    interpreter: str = "main"
    stages: int = 2


NOTE = """\
The GPT of gpt10 in two stages of four layers (embedding and three blocks; three blocks, and norm
with head) on two ranks of one thread, 8 micro-batches of 2 x 128 tokens, float32, no clipping. All
use torch's `AdamW(fused=True)`, are cut at the same layer and get the same batches. A pass is timed
from a barrier, without the optimizer; a step from the end of the one before. DeepSpeed's engine
makes a step as one call, so it has no row for its passes; its defaults are kept but for clipping.
torch's pipeline is not asked for the outputs. **loss**: largest relative difference of the first
losses to those of one process. An action is a forward or a backward with the transfer that follows
it; its processor time counts all threads, so those of gloo too.

The bubble of 1F1B with m micro-batches in two equal stages is 1 / (m + 1), 11.1% here; what is
idle beyond that is the imbalance of the stages, of which the last also has head and loss. It is
simulated for costs taken in the same round. What the actions' own times leave to the measured time
is transfers, the executor, and that actions of one kind do not all take equally long. What lies
between the two simulations is that an action in the pipe does not take what its layers take one by
one: other caches, another rank beside it that computes something else at that moment.
"""

PASSES, STEP, CPU = "forward and backward", "step", "executor's processor time"
SPAN, IDLE = "forward and backward of 1F1B", "idle share of 1F1B"

SINGLE, OURS = "one process", "zeroexp 1F1B"
TORCH, DEEPSPEED = "torch 1F1B", "DeepSpeed 1F1B"
MEASURED = "measured"
BY_LAYERS = "simulated, each layer's cost measured apart"
BY_ACTIONS = "simulated, the actions' own times"


def _zeroexp(schedule: str, *times: str, **options: object) -> Variant:
    return Variant("benchmarks.peers.pipe_zeroexp", times, {"schedule": schedule, **options})


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        SINGLE: Variant("benchmarks.peers.pipe_single", (PASSES, STEP), stages=1),
        TORCH: Variant("benchmarks.peers.pipe_torch", (PASSES, STEP, CPU), {"schedule": "1f1b"}),
        "torch GPipe": Variant("benchmarks.peers.pipe_torch", (PASSES,), {"schedule": "gpipe"}),
        DEEPSPEED: Variant("benchmarks.peers.pipe_deepspeed", (STEP,), interpreter="peers"),
        OURS: _zeroexp("1f1b", PASSES, STEP, CPU),
        "zeroexp GPipe": _zeroexp("gpipe", PASSES),
        "zeroexp ZB-H1": _zeroexp("zb_h1", PASSES, CPU),
        "zeroexp interleaved 1F1B": _zeroexp("interleaved", PASSES, virtual=2),
        "zeroexp ZB-V": _zeroexp("zb_v", PASSES, virtual=2),
    }
)

AGAINST = {PASSES: TORCH, STEP: DEEPSPEED}
"""The row that zeroexp's are held against."""


def loss_difference(timings: Timings, case: str, variant: str) -> float | None:
    """Largest relative difference of the first losses to those without a pipeline."""
    losses = timings.cases.get(case, {}).get("losses", {})
    if variant not in losses or SINGLE not in losses:
        return None
    pairs = zip(losses[variant], losses[SINGLE], strict=False)
    return max(float(abs(a - b) / abs(b)) for a, b in pairs)


def rows(timings: Timings) -> list[str]:
    """Every variant of every case."""
    lines = ["| case | variant | median (min..max) | to the peer | loss |", "|-|-|-|-|-|"]
    for name, case in timings.cases.items():
        for variant, samples in case["samples"].items():
            if not isinstance(samples, list):
                lines.append(f"| {name} | {variant} | missing: {samples} | | |")
                continue
            against = AGAINST.get(name)
            ratio = timings.ratio(name, variant, against) if against else None
            differs = loss_difference(timings, name, variant)
            cells = [
                name,
                variant,
                f"{_spread(Spread.of(samples), '.1f')} {case['unit']}",
                f"{_spread(ratio, '.3f')} of {against}" if ratio and variant != against else "",
                "" if differs is None else f"{differs:.0e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.low:{form}}..{spread.high:{form}})"


def targets(timings: Timings | None) -> list[Verdict]:
    """1F1B against torch's passes and DeepSpeed's step."""
    return [_at_most(timings, case, against) for case, against in AGAINST.items()]


def _at_most(timings: Timings | None, case: str, against: str) -> Verdict:
    text = f"pipeline, {case}: {OURS} at most 1x of {against}"
    ratio = timings.ratio(case, OURS, against) if timings else None
    if timings is None or ratio is None:
        return Verdict(text, None, False)
    for variant in (OURS, against):
        differs = loss_difference(timings, case, variant)
        if differs is None:
            return Verdict(text, None, False)
        if differs > LOSS_TOLERANCE:
            return Verdict(text, f"losses of {variant} differ by {differs:.1e}", False)
    return Verdict(text, shown(ratio), ratio.median <= 1)
