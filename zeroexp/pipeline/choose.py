"""``pipeline.schedule=auto``: the best schedule that is known, or found, for measured costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.cut import Cut, Layer, cut
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules.recipe import Recipe
from zeroexp.pipeline.schedules.registry import RECIPES
from zeroexp.pipeline.search import LISTED, improve, list_schedule
from zeroexp.pipeline.simulate import Simulation, simulate

SEARCHED = "searched"
"""The name of a schedule that was improved for the given costs."""

# Replayed actions that the search may spend: about a second.
_SEARCH_BUDGET = 300_000
_MOST_TRIALS = 400
# One list schedule per layout of stages: the loop with one stage a rank, and the V.
_BASES = {("zb_h1", 1), ("zb_v", 2)}
# Times nearer than this are the same: sums of the same costs in another order.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A schedule that was looked at. ``reason`` is why it lost, empty for the one that won;
    ``simulation`` and ``cut`` are None where it cannot be made."""

    name: str
    virtual: int
    reason: str
    simulation: Simulation | None = None
    cut: Cut | None = None


@dataclass(frozen=True)
class Choice:
    """The schedule that won, how the model is cut for it, its figures, and all that lost."""

    name: str
    virtual: int
    simulation: Simulation
    cut: Cut
    lost: tuple[Candidate, ...]

    @property
    def schedule(self) -> Schedule:
        """Compute actions only, as generators give them."""
        return self.simulation.schedule

    def __str__(self) -> str:
        won = self.simulation
        lines = [
            f"{_label(self.name, self.virtual)}: {won.makespan:.4g} a step, "
            f"{won.bubble_fraction:.1%} idle, {max(won.peak_activations):.4g} micro-batches of "
            f"activations alive at most"
        ]
        lines += [f"  not {_label(c.name, c.virtual)}: {c.reason}" for c in self.lost]
        return "\n".join(lines)


def costs_of(
    layers: Sequence[Layer],
    where: Cut,
    *,
    latency: float = 0,
    seconds_per_byte: float = 0,
    kept: float = 0.5,
) -> Costs:
    """The costs of the stages that ``where`` makes of ``layers``. A transfer takes ``latency`` plus
    ``seconds_per_byte`` for what the last layer of a stage gives out."""
    stages = [[layers[i] for i in where.stage(s)] for s in range(where.num_stages)]
    sent = tuple(stage[-1].output for stage in stages[:-1])
    return Costs(
        tuple(sum(layer.forward for layer in stage) for stage in stages),
        tuple(sum(layer.input_grad for layer in stage) for stage in stages),
        tuple(sum(layer.weight_grad for layer in stage) for stage in stages),
        tuple(sum(layer.activations for layer in stage) for stage in stages),
        tuple(latency + seconds_per_byte * size for size in sent),
        sent,
        kept,
    )


def choose(
    layers: Sequence[Layer],
    stages: int,
    micro_batches: int,
    *,
    memory: float | None = None,
    by: str | Sequence[int] = "time",
    latency: float = 0,
    seconds_per_byte: float = 0,
    kept: float = 0.5,
    split_backward: bool = True,
    max_virtual: int = 4,
    search: bool = True,
) -> Choice:
    """The schedule with the shortest step whose activations stay within ``memory`` (bytes per rank;
    None: no limit); among equals the one that holds less, then the one that sends less.

    ``layers`` carry their measured costs. ``by`` cuts them (see :func:`zeroexp.pipeline.cut.cut`;
    an explicit list fits one number of stages only). ``split_backward`` False leaves out schedules
    that split a backward, ``search`` False those that are found here. Raises :class:`ConfigError`
    if nothing fits, with what the most frugal schedule would need.
    """

    costs_at = partial(
        costs_of, layers, latency=latency, seconds_per_byte=seconds_per_byte, kept=kept
    )
    found = [
        _known(recipe, layers, stages, micro_batches, virtual, by, costs_at)
        for recipe in RECIPES.values()
        if split_backward or not recipe.splits_backward
        for virtual in _allowed(recipe, max_virtual)
    ]
    if search and split_backward:
        found += [
            listed
            for base in found
            if base.simulation is not None and (base.name, base.virtual) in _BASES
            for listed in _listed(base, memory)
        ]
    best = _best(found, memory)
    if search:
        better = _improved(best, memory)
        if better is not best:
            found.append(better)
            best = better
    assert best.simulation is not None and best.cut is not None
    lost = tuple(
        replace(c, reason=c.reason or _why(c, best, memory)) for c in found if c is not best
    )
    return Choice(best.name, best.virtual, best.simulation, best.cut, lost)


def _allowed(recipe: Recipe, max_virtual: int) -> range:
    low, high = recipe.virtual
    return range(low, max(low, min(high or max_virtual, max_virtual)) + 1)


def _known(
    recipe: Recipe,
    layers: Sequence[Layer],
    stages: int,
    micro_batches: int,
    virtual: int,
    by: str | Sequence[int],
    costs_at: Callable[[Cut], Costs],
) -> Candidate:
    try:
        schedule = recipe.make(stages, micro_batches, virtual)
        where = cut(layers, stages * virtual, by)
    except ConfigError as error:
        return Candidate(recipe.name, virtual, " ".join(str(p) for p in error.problems))
    return Candidate(recipe.name, virtual, "", simulate(schedule, costs_at(where)), where)


def _listed(base: Candidate, memory: float | None) -> Iterator[Candidate]:
    """List schedules on the stages of ``base``: within the memory, or with once and twice the
    activations of 1F1B."""
    simulation = base.simulation
    assert simulation is not None
    schedule, costs, ranks = simulation.schedule, simulation.costs, simulation.schedule.num_ranks
    limits: list[float] = [ranks, 2 * ranks - 1] if memory is None else [memory]
    for limit in limits:
        found = list_schedule(
            schedule.rank_of,
            schedule.micro_batches,
            costs,
            [limit] * ranks,
            in_bytes=memory is not None,
        )
        if found is not None:
            yield Candidate(LISTED, base.virtual, "", simulate(found, costs), base.cut)


def _improved(base: Candidate, memory: float | None) -> Candidate:
    simulation = base.simulation
    assert simulation is not None
    size = sum(map(len, simulation.schedule.lists))
    trials = min(_MOST_TRIALS, _SEARCH_BUDGET // max(size, 1))
    found = improve(simulation.schedule, simulation.costs, memory, trials=trials)
    if found.makespan >= simulation.makespan * (1 - _EQUAL):
        return base
    schedule = replace(found.schedule, name=SEARCHED)
    return Candidate(SEARCHED, base.virtual, "", replace(found, schedule=schedule), base.cut)


def _fits(simulation: Simulation, memory: float | None) -> bool:
    return memory is None or max(simulation.peak_bytes) <= memory


def _best(found: Sequence[Candidate], memory: float | None) -> Candidate:
    made = [(c, c.simulation) for c in found if c.simulation is not None]
    fitting = [(c, s) for c, s in made if _fits(s, memory)]
    if not fitting:
        raise ConfigError([_nothing_fits(found, memory)])
    shortest = min(s.makespan for _, s in fitting)
    equal = [(c, s) for c, s in fitting if s.makespan <= shortest * (1 + _EQUAL)]
    return min(
        equal,
        key=lambda pair: (
            max(pair[1].peak_bytes),
            max(pair[1].peak_activations),
            sum(pair[1].sends),
        ),
    )[0]


def _nothing_fits(found: Sequence[Candidate], memory: float | None) -> Problem:
    made = [(c, c.simulation) for c in found if c.simulation is not None]
    if not made:
        reasons = "; ".join(f"{_label(c.name, c.virtual)}: {c.reason}" for c in found)
        return Problem("pipeline.schedule", f"no schedule can be made: {reasons}")
    frugal, figures = min(made, key=lambda pair: max(pair[1].peak_bytes))
    return Problem(
        "pipeline.schedule",
        f"no schedule keeps its activations within {memory:,.0f} bytes per rank.",
        f"{_label(frugal.name, frugal.virtual)} needs the least, {max(figures.peak_bytes):,.0f}; "
        "use smaller micro-batches, recompute or more stages",
    )


def _why(loser: Candidate, winner: Candidate, memory: float | None) -> str:
    lost, won = loser.simulation, winner.simulation
    assert lost is not None and won is not None
    if not _fits(lost, memory):
        return (
            f"activations take {max(lost.peak_bytes):,.0f} bytes on a rank, the limit is "
            f"{memory:,.0f}"
        )
    if lost.makespan > won.makespan * (1 + _EQUAL):
        return (
            f"{lost.makespan:.4g} a step, {lost.makespan / won.makespan - 1:.1%} more "
            f"({lost.bubble_fraction:.1%} idle)"
        )
    if (most := max(lost.peak_activations)) > max(won.peak_activations):
        return f"no faster and {most:.4g} micro-batches of activations alive"
    return f"no better: the same step and {sum(lost.sends)} transfers"


def _label(name: str, virtual: int) -> str:
    return name if virtual == 1 else f"{name} with {virtual} stages per rank"
