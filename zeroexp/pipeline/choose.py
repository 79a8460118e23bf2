"""``pipeline.schedule=auto``: the best schedule that is known, or found, for measured costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.cut import Cut, Layer, cut
from zeroexp.pipeline.schedule import Schedule, loop_ranks, v_ranks
from zeroexp.pipeline.schedules.recipe import Recipe
from zeroexp.pipeline.schedules.registry import RECIPES
from zeroexp.pipeline.search import LISTED, improve, list_schedule
from zeroexp.pipeline.simulate import Simulation, simulate

SEARCHED = "searched"
"""The name of a schedule that was improved for the given costs."""

LISTED_V = "listed_v"
"""The name of a list schedule on a V of stages."""

# Replayed actions that the search may spend: a second or two.
_SEARCH_BUDGET = 300_000
_MOST_TRIALS = 400
# How long a weight gradient may give way, in its own durations: which is best depends on the costs.
_RELUCTANCES = (0, 0.3, 0.6)
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
        found += _listed(layers, stages, micro_batches, by, max_virtual, memory, costs_at)
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
    return range(low, min(high or max_virtual, max_virtual) + 1)


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


def _listed(
    layers: Sequence[Layer],
    stages: int,
    micro_batches: int,
    by: str | Sequence[int],
    max_virtual: int,
    memory: float | None,
    costs_at: Callable[[Cut], Costs],
) -> Iterator[Candidate]:
    """The best list schedule of each layout of the stages: within the memory, or with once to twice
    the activations of 1F1B."""
    limits: list[float] = [stages, 1.5 * stages, 2 * stages - 1] if memory is None else [memory]
    layouts = [loop_ranks(stages, v) for v in range(1, max_virtual + 1)]
    if max_virtual > 1:
        layouts.append(v_ranks(stages))
    for rank_of in layouts:
        virtual = len(rank_of) // stages
        try:
            where = cut(layers, len(rank_of), by)
        except ConfigError:
            continue  # the known schedules of as many stages say why
        costs = costs_at(where)
        made = [
            list_schedule(
                rank_of,
                micro_batches,
                costs,
                [limit] * stages,
                in_bytes=memory is not None,
                reluctance=reluctance,
            )
            for limit in limits
            for reluctance in _RELUCTANCES
        ]
        simulated = [simulate(schedule, costs) for schedule in made if schedule is not None]
        if simulated:
            best = min(simulated, key=lambda s: (s.makespan, max(s.peak_bytes)))
            name = LISTED if rank_of == loop_ranks(stages, virtual) else LISTED_V
            yield Candidate(name, virtual, best, where)


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
