"""From the raw samples of one training result to the numbers of a table row. Pure arithmetic, no
torch.

Step time is the maximum over the ranks. A ratio is the median over the rounds of the quotient of
two modes' medians within the same round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.modes import mode_named

LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a sample."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


class WorkResult:
    """One work's result: ``data`` is the ``work`` part of a result file."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.name: str = data["name"]
        self.title: str = data["title"]
        self.num_params: int = data["num_params"]
        self._modes: Mapping[str, Any] = data["modes"]

    def mode(self, name: str) -> Mapping[str, Any] | None:
        """The samples of a mode that ran to the end, or None."""
        found = self._modes.get(name)
        return found if found is not None and found["status"] == "ok" else None

    def reason(self, name: str) -> str:
        """Why a mode is missing."""
        found = self._modes.get(name)
        return "not in this run" if found is None else str(found["reason"])

    def step_seconds(self, name: str) -> Spread | None:
        found = self.mode(name)
        if found is None:
            return None
        return Spread.of(
            [t for ranks in found["rounds"] for t in map(max, zip(*ranks, strict=True))]
        )

    def ratio(self, name: str, against: str) -> Spread | None:
        """Step time of ``name`` over that of ``against``, round by round; None if either is
        missing."""
        ours, theirs = self.mode(name), self.mode(against)
        if ours is None or theirs is None:
            return None
        pairs = zip(ours["rounds"], theirs["rounds"], strict=True)
        return Spread.of([_round_median(a) / _round_median(b) for a, b in pairs])

    def launch_seconds(self, name: str) -> Spread | None:
        found = self.mode(name)
        if found is None:
            return None
        return Spread.of([launch["first_step_seconds"] for launch in found["launches"]])

    def bytes_per_param(self, name: str, kind: str) -> float | None:
        """``kind`` is state, params, grads, optim or tensors; the mean over the ranks."""
        found = self.mode(name)
        if found is None or found["memory"] is None:
            return None
        ranks = found["memory"]
        return float(sum(rank[kind] for rank in ranks) / len(ranks) / self.num_params)

    def memory(self, name: str) -> list[Mapping[str, Any]] | None:
        """The byte counts of every rank."""
        found = self.mode(name)
        ranks: list[Mapping[str, Any]] | None = None if found is None else found["memory"]
        return ranks

    def peak_bytes_per_param(self, name: str, *, steady: bool = False) -> float | None:
        """Peak resident set above the baseline: since before the model was built, or (``steady``)
        in training after the warm-up; the larger rank, the median over the launches."""
        found = self.mode(name)
        if found is None or found["memory"] is None:
            return None
        baselines = [rank["rss_baseline"] for rank in found["memory"]]
        peaks = []
        for launch in found["launches"]:
            both = launch["peak_rss_steady"]
            if not steady:
                both = [max(pair) for pair in zip(both, launch["peak_rss"], strict=True)]
            peaks.append(max(p - b for p, b in zip(both, baselines, strict=True)))
        return float(median(peaks) / self.num_params)

    def loss_difference(self, name: str, against: str) -> float | None:
        """Largest relative difference of the first losses; a floor that takes no steps is compared
        on the first one only."""
        ours, theirs = self.mode(name), self.mode(against)
        if ours is None or theirs is None:
            return None
        count = len(ours["losses"]) if mode_named(name).trains else 1
        pairs = list(zip(ours["losses"], theirs["losses"], strict=True))[:count]
        return max(float(abs(a - b) / abs(b)) for a, b in pairs)


def _round_median(ranks: list[list[float]]) -> float:
    seconds: list[float] = [max(step) for step in zip(*ranks, strict=True)]
    return median(seconds)
