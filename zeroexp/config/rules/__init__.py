"""The one table of combinations that are refused, with reason and fix."""

from __future__ import annotations

from collections.abc import Iterable

from zeroexp.config.rules.model import MODEL_RULES
from zeroexp.config.rules.moe import MOE_RULES
from zeroexp.config.rules.offload import OFFLOAD_RULES
from zeroexp.config.rules.pipeline import PIPELINE_RULES
from zeroexp.config.rules.precision import PRECISION_RULES
from zeroexp.config.rules.ranks import RANK_RULES
from zeroexp.config.rules.rule import ALWAYS, COMMAND, START, Rule, differs
from zeroexp.config.rules.run import RUN_RULES
from zeroexp.config.rules.start import START_RULES
from zeroexp.config.setting import Key
from zeroexp.config.tree import KEYS, Config, option_key
from zeroexp.errors import Problem

__all__ = ["ALWAYS", "COMMAND", "RULES", "START", "Rule", "broken"]


def _does_nothing(key: Key) -> Rule:
    """A key of one kind set for another: it would be accepted and ignored."""
    kind = option_key(key.section)
    others = ", ".join(key.meta.kinds)
    return Rule(
        key=key.path,
        why=f"belongs to {kind} {others}",
        reads=(key.path, kind),
        broken=lambda c: c.get(kind) not in key.meta.kinds and differs(c, key.path),
        problem=lambda c: f"does nothing with {kind}={c.get(kind)}.",
        fix=lambda c: f"It belongs to {others}; leave it out",
    )


RULES: tuple[Rule, ...] = (
    *RANK_RULES,
    *PIPELINE_RULES,
    *OFFLOAD_RULES,
    *PRECISION_RULES,
    *MODEL_RULES,
    *MOE_RULES,
    *RUN_RULES,
    *(_does_nothing(key) for key in KEYS.values() if key.meta.kinds),
    *START_RULES,
)


# Each scope holds what the one before it holds, and more.
_SCOPES = (ALWAYS, COMMAND, START)


def broken(
    config: Config, *, ignore: frozenset[str] = frozenset(), scope: str = ALWAYS
) -> list[Problem]:
    """One problem for every broken rule, in the order of the table.

    ``ignore`` names keys, or sections, whose value is not to be trusted: rules that read them stay
    silent. ``scope`` is what the configuration is for: see :mod:`zeroexp.config.rules.rule`.
    """
    problems = []
    for rule in RULES:
        holds = _SCOPES.index(rule.scope) <= _SCOPES.index(scope)
        trusted = not any(_within(path, ignore) for path in rule.reads)
        if holds and trusted and rule.broken(config):
            problem = Problem(rule.key, rule.problem(config), _stop(rule.fix(config)))
            if problem not in problems:
                problems.append(problem)
    return problems


def _within(path: str, ignore: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in ignore)


def _stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
