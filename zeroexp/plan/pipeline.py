"""The pipeline that a configuration asks for: its cut, its schedule and what that costs, from the
shapes of the layers alone."""

from __future__ import annotations

from collections.abc import Sequence
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
    stage, under the names that its layers use and under all their names in the model; a tied one is
    in every stage that holds it. ``choice`` is how `auto` came to the schedule.
    """

    layers: tuple[Layer, ...]
    cut: Cut
    simulation: Simulation
    stages: tuple[tuple[tuple[ParamSpec, tuple[str, ...]], ...], ...]
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

    def held(self, place: int) -> list[tuple[int, list[ParamSpec]]]:
        """The stages of a rank of the pipe with their parameters. One that two of them share is one
        parameter, with the first."""
        found, seen = [], set[tuple[str, ...]]()
        for stage in self.schedule.stages_of(place):
            new = [spec for spec, known in self.stages[stage] if known not in seen]
            seen |= {known for _, known in self.stages[stage]}
            found.append((stage, new))
        return found

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
        tuple(_held([shapes[i] for i in where.stage(stage)], specs))
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


def _held(
    shapes: Sequence[LayerShape], specs: Sequence[ParamSpec]
) -> list[tuple[ParamSpec, tuple[str, ...]]]:
    """The parameters of a stage, each once."""
    found = []
    for spec in specs:
        names = [name for shape in shapes for name in shape.names_of(spec)]
        if names:
            here = replace(spec, name=names[0], aliases=tuple(names[1:]))
            found.append((here, (spec.name, *spec.aliases)))
    return found
