"""One rule between several keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroexp.config.tree import KEYS, Config

# When a rule holds: for every configuration, for one from a command line (where the defaults of all
# sections count, also those an engine in a script of its own never reads), or for a run that is
# about
# to start on this machine.
ALWAYS, COMMAND, START = "always", "command", "start"


@dataclass(frozen=True)
class Rule:
    """A combination that cannot run.

    ``key`` is reported, ``why`` is the reason in general (it stands in the key reference),
    ``reads`` are the keys the predicate looks at, ``broken`` says whether a configuration breaks
    the rule, ``problem`` and ``fix`` make the two sentences of the report with the numbers in them.
    ``scope`` says when the rule holds.
    """

    key: str
    why: str
    reads: tuple[str, ...]
    broken: Callable[[Config], bool]
    problem: Callable[[Config], str]
    fix: Callable[[Config], str]
    scope: str = ALWAYS


def divisors(n: int) -> str:
    """The divisors of ``n`` in words: ``1, 2, 3 or 6``."""
    small = [str(d) for d in range(1, n + 1) if n % d == 0]
    return small[0] if len(small) == 1 else f"{', '.join(small[:-1])} or {small[-1]}"


def ratio(numerator: int, denominator: int) -> str:
    """A quotient in four digits: ``1.5``."""
    return f"{numerator / denominator:.4g}"


def whole_pipes(config: Config) -> bool:
    """Whether the ranks make whole pipes. If not, that is the problem: what is counted in data
    ranks has no meaning."""
    return config.ranks % config.pipeline.size == 0


def differs(config: Config, path: str) -> bool:
    """Whether the value of a key is not its default."""
    return bool(config.get(path) != KEYS[path].default)
