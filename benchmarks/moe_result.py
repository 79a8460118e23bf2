"""What a result of :mod:`benchmarks.moe` says: table and targets. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.summary import LOSS_TOLERANCE, Spread
from benchmarks.targets import Verdict, shown
from benchmarks.timings import Timings


@dataclass(frozen=True)
class Variant:
    """One row of a case. ``against`` is DeepSpeed's row that does the same."""

    module: str
    capacity: float | None = None
    interpreter: str = "main"
    against: str | None = None


DENSE = "dense, same FLOPs"
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        DENSE: Variant("benchmarks.peers.moe_dense"),
        "zeroexp": Variant("benchmarks.peers.moe_zeroexp", against="DeepSpeed"),
        "DeepSpeed": Variant("benchmarks.peers.moe_deepspeed", interpreter="peers"),
        "zeroexp, capacity 1": Variant(
            "benchmarks.peers.moe_zeroexp", 1.0, against="DeepSpeed, capacity 1"
        ),
        "DeepSpeed, capacity 1": Variant("benchmarks.peers.moe_deepspeed", 1.0, "peers"),
    }
)


@dataclass(frozen=True)
class Case:
    """How many experts, choices of a token, and ranks that the experts are spread over."""

    experts: int
    top_k: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.experts} experts, top-{self.top_k}, {self.ranks} rank{'s'[: self.ranks - 1]}"


def difference(timings: Timings, case: str, variant: str, against: str) -> float | None:
    """The largest relative one of the norms of output and gradients. Where tokens are dropped, of
    their number alone: which of those that wanted an expert first it kept is a matter of taste."""
    marks = timings.cases.get(case, {}).get("marks", {})
    if variant not in marks or against not in marks:
        return None
    pairs = list(zip(marks[variant], marks[against], strict=True))
    if VARIANTS[variant].capacity is not None:
        pairs = pairs[:1]
    return max(abs(a - b) / abs(b) if b else abs(a) for a, b in pairs)


def rows(timings: Timings) -> list[str]:
    """Every variant of every case."""
    lines = ["| case | variant | ms | to dense | to DeepSpeed | difference |", "|-|-|-|-|-|-|"]
    for name, case in timings.cases.items():
        for variant, samples in case["samples"].items():
            if not isinstance(samples, list):
                lines.append(f"| {name} | {variant} | missing: {samples} | | | |")
                continue
            against = VARIANTS[variant].against
            differs = difference(timings, name, variant, against) if against else None
            cells = [
                name,
                variant,
                _spread(Spread.of(samples), ".1f"),
                _spread(timings.ratio(name, variant, DENSE), ".3f"),
                _spread(timings.ratio(name, variant, against) if against else None, ".3f"),
                "" if differs is None else f"{differs:.0e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    return f"{spread.median:{form}} ({spread.low:{form}}..{spread.high:{form}})"


def targets(timings: Timings | None) -> list[Verdict]:
    """Against DeepSpeed at 64 experts, and against dense at one rank, where every case has at least
    64 tokens an expert in the mean."""
    ours = [name for name, variant in VARIANTS.items() if variant.against]
    return [
        *(
            _deepspeed(timings, Case(64, top_k, ranks).name, variant, 0.5)
            for ranks, top_k, variant in itertools.product((1, 2), (1, 2), ours)
        ),
        *(
            _time(timings, Case(experts, top_k, 1).name, "zeroexp", DENSE, 1.3)
            for experts, top_k in itertools.product((8, 64), (1, 2))
        ),
    ]


def _deepspeed(timings: Timings | None, case: str, variant: str, limit: float) -> Verdict:
    against = VARIANTS[variant].against
    assert against is not None  # asked only of those
    verdict = _time(timings, case, variant, against, limit)
    differs = difference(timings, case, variant, against) if timings else None
    if verdict.measured is None or differs is None:
        return Verdict(verdict.text, None, False)
    if differs > LOSS_TOLERANCE:
        return Verdict(verdict.text, f"outputs differ by {differs:.1e}", False)
    return verdict


def _time(timings: Timings | None, case: str, variant: str, against: str, limit: float) -> Verdict:
    text = f"MoE, {case}: time of {variant} at most {limit:g}x of {against}"
    ratio = timings.ratio(case, variant, against) if timings else None
    if ratio is None:
        return Verdict(text, None, False)
    return Verdict(text, shown(ratio), ratio.median <= limit)
