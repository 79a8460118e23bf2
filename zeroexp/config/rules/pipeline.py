"""Rules of the pipeline."""

from __future__ import annotations

from zeroexp.config.rules.rule import Rule, divisors, ratio
from zeroexp.config.tree import Config

_RANKS = ("trainer.devices", "trainer.num_nodes")
_PIPE = ("pipeline.schedule", "pipeline.stages")


def _equation(c: Config) -> str:
    """``6 ranks = replicate 1 x shard 1.5 x pipe 4``."""
    shard = c.zero.shard_size if isinstance(c.zero.shard_size, int) else None
    replicate = ratio(c.ranks, c.pipeline.size * shard) if shard else "1"
    return (
        f"{c.ranks} ranks = replicate {replicate} x shard "
        f"{shard or ratio(c.ranks, c.pipeline.size)} x pipe {c.pipeline.size}"
    )


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        key="pipeline.stages",
        why="a schedule says what the ranks of a pipe do",
        reads=_PIPE,
        broken=lambda c: c.pipeline.schedule == "none" and c.pipeline.stages not in (None, 1),
        problem=lambda c: f"{c.pipeline.stages} without a schedule.",
        fix=lambda c: "Use pipeline=1f1b or another schedule, or leave it out",
    ),
    Rule(
        key="pipeline.stages",
        why="ranks = replicate x shard x pipe",
        reads=(*_PIPE, *_RANKS),
        broken=lambda c: c.ranks % c.pipeline.size != 0,
        problem=lambda c: f"{c.pipeline.size} does not divide {c.ranks} ranks.",
        fix=lambda c: f"{_equation(c)}; use {divisors(c.ranks)}",
    ),
)
