"""The pipeline that a configuration asks for: its cut, its schedule and what that costs, from the
shapes of the layers alone."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from zeroexp.config import Config
from zeroexp.layout import ParamSpec
from zeroexp.pipeline.action import Kind
from zeroexp.pipeline.choose import Choice, choose, costs_of
from zeroexp.pipeline.cut import Cut, Layer, cut
from zeroexp.pipeline.residency import with_residency
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.simulate import Simulation, simulate
from zeroexp.plan.formats import NAMES
from zeroexp.plan.layer_shape import LayerShape


@dataclass(frozen=True)
class PipelinePlan:
    """``simulation`` is of one pass of a data rank's batch through the pipe, with GFLOP for seconds
    and predicted bytes; ``passes`` of them make a step. ``stages`` are the parameters of each
    stage, by their first names in the model; a tied one is in every stage that holds it. ``choice``
    is how `auto` came to the schedule.
    """

    layers: tuple[Layer, ...]
    cut: Cut
    simulation: Simulation
    stages: tuple[frozenset[str], ...]
    data_ranks: int
    passes: int
    choice: Choice | None = None

    @property
    def schedule(self) -> Schedule:
        return self.simulation.schedule

    def place(self, rank: int) -> int:
        """Which rank of its pipe ``rank`` is: world = pipe x data, data ranks are neighbours."""
        return rank // self.data_ranks

    def sent_bytes(self, place: int) -> int:
        """Bytes of activations and their gradients that a rank sends to others in a step."""
        return round(self.simulation.sent_bytes[place]) * self.passes

    def held(self, place: int, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
        """Those of ``specs`` that a rank of the pipe holds."""
        return [
            replace(spec, tied=self.num_holders(spec.name) > 1)
            for spec in specs
            if self.stages_using(place, {spec.name})
        ]

    def stages_using(self, place: int, names: Set[str]) -> list[int]:
        """The stages of a rank that use any of the parameters."""
        return [s for s in self.schedule.stages_of(place) if names & self.stages[s]]

    def num_holders(self, name: str) -> int:
        """How many ranks of the pipe hold a parameter."""
        ranks = self.schedule.rank_of
        return len({ranks[s] for s, names in enumerate(self.stages) if name in names})

    def num_gathers(self, place: int, stages: Sequence[int]) -> int:
        """How often a step gathers what ``stages`` of a rank use: from the mark of the first that
        needs it to that of the last it is whole."""
        whole = gathers = 0
        for _, action in self.schedule.actions(place):
            if action.stage in stages and action.kind is Kind.UNSHARD:
                gathers += whole == 0
                whole += 1
            elif action.stage in stages and action.kind is Kind.RESHARD:
                whole -= 1
        return gathers * self.passes

    def num_unshards(self, stage: int) -> int:
        """How often a step gathers a stage whose parameters are sharded."""
        actions = self.schedule.actions(self.schedule.rank_of[stage])
        gathers = sum(a.kind is Kind.UNSHARD and a.stage == stage for _, a in actions)
        return gathers * self.passes


def plan_pipeline(
    config: Config, specs: Sequence[ParamSpec], shapes: Sequence[LayerShape]
) -> PipelinePlan:
    """The pipeline of ``config`` (resolved) for a model of ``shapes`` whose parameters are
    ``specs``. The cut is that of a run, but for a cut by time: a run measures it.

    Raises :class:`zeroexp.errors.ConfigError` where no schedule stays within the memory.
    """
    asked, by = config.pipeline, config.pipeline.cut
    count = config.num_micro_batches
    tokens = config.micro_batch_size // count * config.data.seq_len
    dtype = NAMES[config.precision.compute]
    layers = [
        shape.layer(
            sum(spec.numel for spec in specs if shape.names_of(spec)),
            tokens,
            config.data.seq_len,
            dtype,
        )
        for shape in shapes
    ]
    choice = None
    if asked.recipe is None:
        choice = choose(
            layers,
            asked.size,
            count,
            memory=asked.memory_limit,
            by=by,
            max_virtual=asked.num_virtual,
        )
        where, simulation = choice.won.cut, choice.won.simulation
    else:
        schedule = asked.recipe.make(asked.size, count, asked.num_virtual)
        where = cut(layers, schedule.num_stages, by)
        simulation = simulate(schedule, costs_of(layers, where))
    if config.zero.stage == 3 or config.offload.params_tier != "device":
        marked = with_residency(simulation.schedule, asked.whole_stages)
        simulation = replace(simulation, schedule=marked)
    stages = [
        frozenset(
            spec.name for spec in specs for i in where.stage(stage) if shapes[i].names_of(spec)
        )
        for stage in range(where.num_stages)
    ]
    return PipelinePlan(
        tuple(layers),
        where,
        simulation,
        tuple(stages),
        config.data_ranks,
        config.trainer.accumulate_grad_batches,
        choice,
    )
