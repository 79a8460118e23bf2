"""Results that are plain timings: cases, each with variants that were timed in turn, round after
round. Reading and rendering only, no torch.

A case is ``{"name", "unit", "what", "samples": {variant: [one value a round]}}``; a variant that
could not run has a string, the reason, in place of its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.summary import Spread


class Timings:
    """The cases of one result file."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.cases: Mapping[str, Mapping[str, Any]] = {case["name"]: case for case in data["cases"]}

    def samples(self, case: str, variant: str) -> list[float] | None:
        """One value a round, or None if the variant did not run."""
        found = self.cases[case]["samples"].get(variant) if case in self.cases else None
        return found if isinstance(found, list) else None

    def median(self, case: str, variant: str) -> float | None:
        found = self.samples(case, variant)
        return median(found) if found else None

    def ratio(self, case: str, variant: str, against: str) -> Spread | None:
        """Time of ``variant`` over that of ``against``, round by round."""
        ours, theirs = self.samples(case, variant), self.samples(case, against)
        if not ours or not theirs:
            return None
        return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])

    def difference(self, case: str, variant: str, against: str) -> Spread | None:
        """``variant`` less ``against``, round by round, in the unit of the case."""
        ours, theirs = self.samples(case, variant), self.samples(case, against)
        if not ours or not theirs:
            return None
        return Spread.of([a - b for a, b in zip(ours, theirs, strict=True)])

    def rows(self) -> list[str]:
        """A table of all cases and variants."""
        lines = ["| case | variant | median (min..max) |", "|-|-|-|"]
        for name, case in self.cases.items():
            for variant, found in case["samples"].items():
                if isinstance(found, list):
                    spread = Spread.of(found)
                    cell = (
                        f"{spread.median:.4g} ({spread.low:.4g}..{spread.high:.4g}) {case['unit']}"
                    )
                else:
                    cell = f"missing: {found}"
                lines.append(f"| {name} | {variant} | {cell} |")
        return lines
