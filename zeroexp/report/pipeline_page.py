"""The pipeline's part of ``zeroexp plan``: stages, bytes between them and idle time, as text."""

from __future__ import annotations

from zeroexp.config import Config
from zeroexp.plan.pipeline import PipelinePlan
from zeroexp.run.record import human_bytes

COSTS = "costs counted in FLOPs, transfers free"


def pipeline_head(config: Config, plan: PipelinePlan) -> str:
    """Schedule and sizes in one line."""
    schedule = plan.schedule
    count = schedule.micro_batches
    virtual = f", {schedule.virtual} stages on each" if schedule.virtual > 1 else ""
    by = plan_cut(config)
    return (
        f"pipeline {schedule.name}: {schedule.num_ranks} ranks{virtual}, {plan.data_ranks} "
        f"pipe{'s' * (plan.data_ranks > 1)}; {count} micro-batch{'es' * (count > 1)} of "
        f"{config.micro_batch_size // count}, {by}"
    )


def plan_cut(config: Config) -> str:
    by = config.pipeline.cut
    if not isinstance(by, str):
        return "cut as given"
    return "cut by FLOPs (a run measures the time)" if by == "time" else f"cut by {by}"


def stage_rows(plan: PipelinePlan) -> list[list[str]]:
    """A stage a row: its ranks, layers, parameters, and the bytes that cross to the next."""
    rows = [["stage", "ranks", "layers", "parameters", "sends on"]]
    passes = plan.passes * plan.schedule.micro_batches
    for stage, place in enumerate(plan.schedule.rank_of):
        first = place * plan.data_ranks
        last = first + plan.data_ranks - 1
        held = [plan.layers[i] for i in plan.cut.stage(stage)]
        names = held[0].name if len(held) == 1 else f"{held[0].name} to {held[-1].name}"
        is_last = stage == plan.schedule.num_stages - 1
        crosses = not is_last and plan.schedule.rank_of[stage + 1] != place
        rows.append(
            [
                str(stage),
                str(first) if first == last else f"{first}-{last}",
                names,
                f"{sum(layer.params for layer in held):,}",
                human_bytes(round(held[-1].output) * passes) if crosses else "-",
            ]
        )
    return rows


def rank_rows(plan: PipelinePlan) -> list[list[str]]:
    """A rank of the pipe a row: what it keeps for backward at most, how long it idles."""
    simulation = plan.simulation
    rows = [["ranks", "micro-batches alive", "activations", "idle"]]
    for place in range(plan.schedule.num_ranks):
        first = place * plan.data_ranks
        last = first + plan.data_ranks - 1
        idle = simulation.idle[place] / simulation.makespan if simulation.makespan else 0
        rows.append(
            [
                str(first) if first == last else f"{first}-{last}",
                f"{simulation.peak_activations[place]:.4g}",
                human_bytes(round(simulation.peak_bytes[place])),
                f"{idle:.1%}",
            ]
        )
    return rows


def gather_lines(config: Config, plan: PipelinePlan) -> list[str]:
    """How many gathers of a pipeline stage ZeRO stage 3 costs with this schedule."""
    if config.zero.stage != 3 or config.shard_size == 1:
        return []
    schedule = plan.schedule
    counts = [plan.num_unshards(stage) for stage in range(schedule.num_stages)]
    worst, least = max(counts), 2 * plan.passes
    text = f"zero=stage3 gathers a stage of the pipe up to {worst} times in a step"
    if worst > least:
        text += (
            f"; with pipeline.whole_stages={schedule.virtual} or pipeline=breadth_first less often"
        )
    return [text]
