"""Rules of the pipeline. What a schedule or a cut demands is asked of them, not said again."""

from __future__ import annotations

from collections.abc import Callable

from zeroexp.config.rules.rule import ALWAYS, COMMAND, Rule, differs, divisors, ratio, whole_pipes
from zeroexp.config.tree import Config
from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.cut import Layer, cut

_RANKS = ("trainer.devices", "trainer.num_nodes")
_PIPE = ("pipeline.schedule", "pipeline.stages")
_BATCH = ("data.batch_size", "data.micro_batch_size", "trainer.accumulate_grad_batches", *_RANKS)
_COUNT = ("pipeline.micro_batches", "pipeline.virtual", *_PIPE, *_BATCH)
_CUT = ("pipeline.cut", "pipeline.virtual", *_PIPE, "model.layers", "model.kind")

#: How far a batch size is looked for that a schedule can use.
_NEAR = 256


def _equation(c: Config) -> str:
    """``6 ranks = replicate 1 x shard 1.5 x pipe 4``, and what mends it."""
    shard = c.zero.shard_size if isinstance(c.zero.shard_size, int) else None
    replicate = ratio(c.ranks, c.pipeline.size * shard) if shard else "1"
    more = f", or trainer.devices={c.pipeline.size}" if c.ranks < c.pipeline.size else ""
    return (
        f"{_ranks(c)} = replicate {replicate} x shard "
        f"{shard or ratio(c.ranks, c.pipeline.size)} x pipe {c.pipeline.size}; "
        f"use {divisors(c.ranks)}{more}"
    )


def _whole_pipes(given: bool) -> Rule:
    """Ranks that were written down, or counted, make whole pipes anywhere; the one of the default
    counts where a command line starts it. In a script, Lightning or torchrun may start more."""
    return Rule(
        key="pipeline.stages",
        why="ranks = replicate x shard x pipe",
        reads=(*_PIPE, *_RANKS),
        broken=lambda c: any(differs(c, key) for key in _RANKS) is given and not whole_pipes(c),
        problem=lambda c: f"{c.pipeline.size} does not divide {_ranks(c)}.",
        fix=_equation,
        scope=ALWAYS if given else COMMAND,
    )


def _ranks(c: Config) -> str:
    return f"{c.ranks} rank{'s' * (c.ranks > 1)}"


# -- the batch -------------------------------------------------------------------------------------


def _has_batches(c: Config) -> bool:
    """Whether the batch comes out: if not, that is the problem to report."""
    parts = c.data_ranks * c.trainer.accumulate_grad_batches
    return whole_pipes(c) and c.micro_batch_size >= 1 and c.batch_size % parts == 0


def _batch_is_given(c: Config) -> bool:
    return c.data.batch_size is not None or c.data.micro_batch_size is not None


def _demands(c: Config, micro_batches: int) -> list[Problem]:
    recipe = c.pipeline.recipe
    if recipe is None or not c.pipeline.is_on:
        return []
    return recipe.problems(c.pipeline.size, micro_batches, c.pipeline.num_virtual)


def _suits(c: Config, micro_batches: int) -> bool:
    return not any(p.key == "pipeline.micro_batches" for p in _demands(c, micro_batches))


def _counts(c: Config, samples: int) -> list[int]:
    """Numbers of micro-batches that divide ``samples`` and suit the schedule."""
    return [n for n in range(1, samples + 1) if samples % n == 0 and _suits(c, n)]


def _nearest_counts(c: Config) -> str:
    counts, asked = _counts(c, c.micro_batch_size), c.pipeline.micro_batches or 1
    near = [n for n in counts if n < asked][-1:] + [n for n in counts if n > asked][:1]
    return " or ".join(map(str, near))


def _batches(c: Config, samples: list[int]) -> str:
    """The keys that give a data rank one of ``samples`` sequences."""
    if c.data.batch_size is None and c.data.micro_batch_size is not None:
        return f"data.micro_batch_size={' or '.join(map(str, samples))}"
    parts = c.data_ranks * c.trainer.accumulate_grad_batches
    return f"data.batch_size={' or '.join(str(n * parts) for n in samples)}"


def _even(c: Config) -> str:
    """What mends a number of micro-batches that does not divide the batch."""
    count, samples = c.pipeline.micro_batches or 1, c.micro_batch_size
    below = samples // count * count
    sizes = [n for n in (below, below + count) if n]
    counts = _nearest_counts(c)
    return f"Use {counts + ', or ' if counts else ''}{_batches(c, sizes)}"


def _divides(given: bool) -> Rule:
    """A batch that was written down counts anywhere; the default one only where a command line
    makes the batches from it."""
    return Rule(
        key="pipeline.micro_batches",
        why="a data rank's batch goes through the pipe in equal parts",
        reads=_COUNT,
        broken=lambda c: (
            _batch_is_given(c) is given
            and c.pipeline.is_on
            and c.pipeline.micro_batches is not None
            and _suits(c, c.pipeline.micro_batches)
            and _has_batches(c)
            and c.micro_batch_size % c.pipeline.micro_batches != 0
        ),
        problem=lambda c: (
            f"{c.pipeline.micro_batches} parts of {c.micro_batch_size} sequences are not equal."
        ),
        fix=_even,
        scope=ALWAYS if given else COMMAND,
    )


def _some_count(given: bool) -> Rule:
    def better(c: Config) -> list[int]:
        samples = c.micro_batch_size
        below = [n for n in range(samples - 1, 0, -1) if _counts(c, n)][:1]
        return below + [n for n in range(samples + 1, samples + _NEAR) if _counts(c, n)][:1]

    return Rule(
        key="data.batch_size",
        why="some number of micro-batches divides a data rank's batch and suits the schedule",
        reads=_COUNT,
        broken=lambda c: (
            _batch_is_given(c) is given
            and c.pipeline.is_on
            and c.pipeline.micro_batches is None
            and _has_batches(c)
            and not _counts(c, c.micro_batch_size)
        ),
        problem=lambda c: (
            f"{c.micro_batch_size} sequences per data rank make no number of micro-batches that "
            f"{c.pipeline.schedule} takes."
        ),
        fix=lambda c: f"Use {_batches(c, better(c))}",
        scope=ALWAYS if given else COMMAND,
    )


# -- the schedule and the cut ----------------------------------------------------------------------


def _schedule_problems(c: Config) -> list[Problem]:
    """What the schedule says of the numbers that were given."""
    given = c.pipeline.micro_batches
    # A multiple of all stages suits every schedule: then it speaks of the other numbers only.
    return _demands(c, given if given is not None else c.pipeline.size)


def _cut_problems(c: Config) -> list[Problem]:
    """What the cut says of a built-in model: its layers all have parameters."""
    pipeline, count = c.pipeline, c.model.num_pipeline_layers
    if not pipeline.is_on or count is None:
        return []
    by = pipeline.cut
    if pipeline.recipe is None:
        stages, by = pipeline.size, "layers"  # auto takes as many stages as it has layers for
    else:
        stages = pipeline.size * pipeline.num_virtual
    try:
        cut([Layer("", 1)] * count, stages, "layers" if isinstance(by, str) else by)
    except ConfigError as error:
        return list(error.problems)
    return []


def _asked(
    key: str,
    why: str,
    reads: tuple[str, ...],
    ask: Callable[[Config], list[Problem]],
    scope: str = ALWAYS,
) -> Rule:
    """A rule that lets ``ask(config)`` find the problems of ``key``."""

    def first(c: Config) -> Problem:
        return next(p for p in ask(c) if p.key == key)

    return Rule(
        key=key,
        why=why,
        reads=reads,
        broken=lambda c: any(p.key == key for p in ask(c)),
        problem=lambda c: first(c).problem,
        fix=lambda c: first(c).fix,
        scope=scope,
    )


def _says_the_schedule(key: str) -> Rule:
    """A key that orders the gathers of a pass, in a pipe whose list orders them."""
    return Rule(
        key=key,
        why="in a pipeline the schedule says when parameters are gathered and released",
        reads=(key, *_PIPE),
        broken=lambda c: c.pipeline.is_on and differs(c, key),
        problem=lambda c: f"{c.get(key)} does nothing in a pipeline.",
        fix=lambda c: "Leave it out; pipeline.whole_stages keeps more stages whole",
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
    _whole_pipes(given=True),
    _whole_pipes(given=False),
    _asked(
        "pipeline.virtual",
        "a schedule is made for so many stages per rank",
        ("pipeline.virtual", "pipeline.micro_batches", *_PIPE),
        _schedule_problems,
    ),
    _asked(
        "pipeline.micro_batches",
        "a schedule may take its micro-batches in rounds of the stages",
        ("pipeline.virtual", "pipeline.micro_batches", *_PIPE),
        _schedule_problems,
    ),
    _divides(given=True),
    _divides(given=False),
    _some_count(given=True),
    _some_count(given=False),
    # A script of one's own brings another model than the default one.
    _asked("pipeline.stages", "every stage has a layer", _CUT, _cut_problems, COMMAND),
    _asked(
        "pipeline.cut",
        "the layers of all stages are those of the model",
        _CUT,
        _cut_problems,
        COMMAND,
    ),
    Rule(
        key="pipeline.whole_stages",
        why="only stage 3 gathers parameters, and a rank cannot hold more stages than it has",
        reads=("pipeline.whole_stages", "pipeline.virtual", "zero.stage", *_PIPE),
        broken=lambda c: (
            c.pipeline.is_on
            and differs(c, "pipeline.whole_stages")
            and (c.zero.stage != 3 or c.pipeline.whole_stages > c.pipeline.num_virtual)
        ),
        problem=lambda c: (
            f"does nothing at zero.stage={c.zero.stage}."
            if c.zero.stage != 3
            else f"{c.pipeline.whole_stages} of {c.pipeline.num_virtual} stages per rank."
        ),
        fix=lambda c: (
            "Use zero=stage3, or leave it out"
            if c.zero.stage != 3
            else f"Use at most pipeline.virtual, {c.pipeline.num_virtual}"
        ),
    ),
    *(_says_the_schedule(key) for key in ("zero.prefetch", "zero.reshard_after_forward")),
)
