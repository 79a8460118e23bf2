"""Rules of the rank equation and the batch equation."""

from __future__ import annotations

from zeroexp.config.rules.rule import ALWAYS, COMMAND, Rule, divisors, ratio, whole_pipes
from zeroexp.config.tree import DEFAULT_BATCH_SIZE, Config
from zeroexp.config.value import show

_RANKS = ("trainer.devices", "trainer.num_nodes", "pipeline.schedule", "pipeline.stages")
_BATCH = ("data.batch_size", "data.micro_batch_size", "trainer.accumulate_grad_batches", *_RANKS)


def _parts(c: Config) -> int:
    return c.data_ranks * c.trainer.accumulate_grad_batches


def _equation(c: Config, micro: object) -> str:
    return (
        f"micro_batch_size {micro} x data ranks {c.data_ranks} x "
        f"accumulate_grad_batches {c.trainer.accumulate_grad_batches}"
    )


def _whole_batches(c: Config) -> str:
    parts = _parts(c)
    below = c.batch_size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    return (
        f"{c.batch_size} = {_equation(c, ratio(c.batch_size, parts))}; use data.batch_size={near}, "
        f"or give data.micro_batch_size"
    )


def _batch_problem(c: Config) -> str:
    given = (
        f"{c.batch_size}"
        if c.data.batch_size is not None
        else f"{DEFAULT_BATCH_SIZE} (the default)"
    )
    if c.batch_size < c.data_ranks:
        return f"{given} sequences are fewer than {c.data_ranks} data ranks."
    if c.trainer.accumulate_grad_batches > 1:
        return f"{given} is not divisible by {c.data_ranks} x {c.trainer.accumulate_grad_batches}."
    return f"{given} is not divisible by {c.data_ranks} data ranks."


def _whole_micro_batch(given: bool) -> Rule:
    """A batch size that was written down must come out anywhere; the default one only where a
    command line makes the batches from it."""
    return Rule(
        key="data.batch_size",
        why="batch_size / (data ranks x accumulate_grad_batches) is a whole number",
        reads=_BATCH,
        broken=lambda c: (
            (c.data.batch_size is not None) is given
            and c.data.micro_batch_size is None
            and whole_pipes(c)
            and c.batch_size % _parts(c) != 0
        ),
        problem=_batch_problem,
        fix=_whole_batches,
        scope=ALWAYS if given else COMMAND,
    )


RANK_RULES: tuple[Rule, ...] = (
    Rule(
        key="data.batch_size",
        why="batch_size = micro_batch_size x data ranks x accumulate_grad_batches",
        reads=_BATCH,
        broken=lambda c: (
            c.data.batch_size is not None
            and c.data.micro_batch_size is not None
            and whole_pipes(c)
            and c.data.batch_size != c.data.micro_batch_size * _parts(c)
        ),
        problem=lambda c: (
            f"{c.data.batch_size} is not {c.data.micro_batch_size} x {c.data_ranks} x "
            f"{c.trainer.accumulate_grad_batches}."
        ),
        fix=lambda c: (
            f"{(c.data.micro_batch_size or 0) * _parts(c)} = "
            f"{_equation(c, c.data.micro_batch_size)}; "
            "leave data.batch_size or data.micro_batch_size out"
        ),
    ),
    _whole_micro_batch(given=True),
    _whole_micro_batch(given=False),
    Rule(
        key="zero.shard_size",
        why="only stage 3 shards parameters in groups smaller than all data ranks",
        reads=("zero.shard_size", "zero.stage"),
        broken=lambda c: c.zero.shard_size is not None and c.zero.stage != 3,
        problem=lambda c: f"{show(c.zero.shard_size)} has no meaning at stage {c.zero.stage}.",
        fix=lambda c: "Use zero=hybrid (stage 3), or leave zero.shard_size out",
    ),
    Rule(
        key="zero.shard_size",
        why="data ranks = replicate x shard, and ranks = data ranks x pipe",
        reads=("zero.shard_size", *_RANKS),
        broken=lambda c: (
            isinstance(c.zero.shard_size, int)
            and whole_pipes(c)
            and c.data_ranks % c.zero.shard_size != 0
        ),
        problem=lambda c: (
            f"{c.zero.shard_size} does not divide {c.data_ranks} {'data ' * c.pipeline.is_on}ranks."
        ),
        fix=lambda c: (
            f"{c.ranks} ranks = replicate {ratio(c.data_ranks, c.shard_size)} x shard "
            f"{c.shard_size}{f' x pipe {c.pipeline.size}' * c.pipeline.is_on}; "
            f"use {divisors(c.data_ranks)}"
        ),
    ),
)
