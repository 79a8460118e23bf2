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
    """A schedule on a cut of the model, with its figures."""

    name: str
    virtual: int
    simulation: Simulation
    cut: Cut

    @property
    def label(self) -> str:
        return _label(self.name, self.virtual)


@dataclass(frozen=True)
class Loser:
    """A schedule that was not taken and why; ``candidate`` is None where it cannot be made."""

    name: str
    virtual: int
    reason: str
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Choice:
    """The schedule that won, with its cut and figures, and all that lost."""

    won: Candidate
    lost: tuple[Loser, ...]

    @property
    def schedule(self) -> Schedule:
        """Compute actions only, as generators give them."""
        return self.won.simulation.schedule

    def __str__(self) -> str:
        figures = self.won.simulation
        lines = [
            f"{self.won.label}: {figures.makespan:.4g} a step, {figures.bubble_fraction:.1%} idle, "
            f"{max(figures.peak_activations):.4g} micro-batches of activations alive at most"
        ]
        lines += [f"  not {_label(x.name, x.virtual)}: {x.reason}" for x in self.lost]
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
    found: list[Candidate] = []
    refused: list[Loser] = []
    for recipe in RECIPES.values():
        if recipe.splits_backward and not split_backward:
            continue
        for virtual in _allowed(recipe, max_virtual):
            try:
                found.append(_known(recipe, layers, stages, micro_batches, virtual, by, costs_at))
            except ConfigError as error:
                why = " ".join(map(str, error.problems))
                refused.append(Loser(recipe.name, virtual, why))
    if search and split_backward:
        bases = [c for c in found if (c.name, c.virtual) in _BASES]
        found += [listed for base in bases for listed in _listed(base, memory)]
    best = _best(found, refused, memory)
    if search:
        better = _improved(best, memory)
        if better is not None:
            found.append(better)
            best = better
    lost = [Loser(c.name, c.virtual, _why(c, best, memory), c) for c in found if c is not best]
    return Choice(best, (*lost, *refused))


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
    schedule = recipe.make(stages, micro_batches, virtual)
    where = cut(layers, stages * virtual, by)
    return Candidate(recipe.name, virtual, simulate(schedule, costs_at(where)), where)


def _listed(base: Candidate, memory: float | None) -> Iterator[Candidate]:
    """List schedules on the stages of ``base``: within the memory, or with once and twice the
    activations of 1F1B."""
    schedule, costs = base.simulation.schedule, base.simulation.costs
    ranks = schedule.num_ranks
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
            yield Candidate(LISTED, base.virtual, simulate(found, costs), base.cut)


def _improved(base: Candidate, memory: float | None) -> Candidate | None:
    """What the search makes of ``base`` if it gets faster."""
    schedule, costs = base.simulation.schedule, base.simulation.costs
    trials = min(_MOST_TRIALS, _SEARCH_BUDGET // max(1, sum(map(len, schedule.lists))))
    found = improve(schedule, costs, memory, trials=trials)
    if found.makespan >= base.simulation.makespan * (1 - _EQUAL):
        return None
    found = replace(found, schedule=replace(found.schedule, name=SEARCHED))
    return Candidate(SEARCHED, base.virtual, found, base.cut)


def _fits(simulation: Simulation, memory: float | None) -> bool:
    return memory is None or max(simulation.peak_bytes) <= memory


def _best(found: Sequence[Candidate], refused: Sequence[Loser], memory: float | None) -> Candidate:
    fitting = [c for c in found if _fits(c.simulation, memory)]
    if not fitting:
        raise ConfigError([_nothing_fits(found, refused, memory)])
    shortest = min(c.simulation.makespan for c in fitting)
    equal = [c for c in fitting if c.simulation.makespan <= shortest * (1 + _EQUAL)]
    return min(equal, key=lambda c: _frugality(c.simulation))


def _frugality(simulation: Simulation) -> tuple[float, float, int]:
    return (
        max(simulation.peak_bytes),
        max(simulation.peak_activations),
        sum(simulation.sends),
    )


def _nothing_fits(
    found: Sequence[Candidate], refused: Sequence[Loser], memory: float | None
) -> Problem:
    if not found:
        reasons = "; ".join(f"{_label(x.name, x.virtual)}: {x.reason}" for x in refused)
        return Problem("pipeline.schedule", f"no schedule can be made: {reasons}")
    frugal = min(found, key=lambda c: _frugality(c.simulation))
    return Problem(
        "pipeline.schedule",
        f"no schedule keeps its activations within {memory:,.0f} bytes per rank.",
        f"{frugal.label} needs the least, {max(frugal.simulation.peak_bytes):,.0f}; use smaller "
        "micro-batches, recompute or more stages",
    )


def _why(loser: Candidate, winner: Candidate, memory: float | None) -> str:
    lost, won = loser.simulation, winner.simulation
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
    if max(lost.peak_bytes) > max(won.peak_bytes):
        return f"the same step with {max(lost.peak_bytes):,.0f} bytes of activations on a rank"
    if (most := max(lost.peak_activations)) > max(won.peak_activations):
        return f"the same step with {most:.4g} micro-batches of activations alive"
    return f"the same step with {sum(lost.sends)} transfers"


def _label(name: str, virtual: int) -> str:
    return name if virtual == 1 else f"{name} with {virtual} stages per rank"
