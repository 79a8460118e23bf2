"""One rule between several keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroexp.config.tree import Config


@dataclass(frozen=True)
class Rule:
    """A combination that cannot run.

    ``key`` is reported, ``why`` is the reason in general (it stands in the key reference), ``reads`` are the keys the
    predicate looks at, ``broken`` says whether a configuration breaks the rule, ``problem`` and ``fix`` make the two
    sentences of the report with the numbers in them. ``start`` marks rules about this machine, its files and its
    ranks: they hold for a run that starts here, not for a plan.
    """

    key: str
    why: str
    reads: tuple[str, ...]
    broken: Callable[[Config], bool]
    problem: Callable[[Config], str]
    fix: Callable[[Config], str]
    start: bool = False
