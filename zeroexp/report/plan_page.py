"""``zeroexp plan``: what every rank will hold and send, and whether it fits, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroexp.config import Config
from zeroexp.plan.pipeline import PipelinePlan
from zeroexp.report.pipeline_page import (
    COSTS,
    gather_lines,
    pipeline_head,
    rank_rows,
    stage_rows,
)
from zeroexp.run.forecast import Forecast
from zeroexp.run.record import human_bytes

_KINDS = (("params", "parameters"), ("grads", "gradients"), ("optim", "optimizer"))
_HOME = "device"
_MOVES = {
    "transfer_bytes_per_step": "moves between the device and its other tiers",
    "io_bytes_per_step": "reads and writes in swap files",
}
# Ranks hold almost the same; more rows than this say nothing new.
_MOST_RANKS = 8


def plan_page(config: Config, forecast: Forecast | None) -> str:
    """Stages of a pipeline; state per rank, kind and tier; padding; traffic per step by collective,
    between tiers and with swap files; the verdict on memory and disk.

    ``forecast`` None is a model that only its ranks can describe.
    """
    ranks = config.ranks
    lines = [
        f"ZeRO stage {config.zero.stage} on {ranks} {config.trainer.accelerator} rank"
        f"{'s' if ranks > 1 else ''}, {_precision(config)}, optimizer {config.optim.kind}"
    ]
    if forecast is None:
        lines.append(
            f"model {config.model.target}: a model of your own is known to its ranks only, "
            "so nothing can be predicted here"
        )
        return "\n".join(lines)
    lines.append(f"model {config.model.kind}: {forecast.size}")
    predicted = forecast.predicted
    if forecast.pipeline is not None:
        lines += _pipeline(config, forecast.pipeline)
    shown = sorted(predicted["state_bytes"], key=int)
    lines += ["", "state bytes that stay on each rank between steps (padding included):"]
    lines += _table(_state_rows(predicted, shown[:_MOST_RANKS]))
    if len(shown) > _MOST_RANKS:
        lines.append(f"  … and {len(shown) - _MOST_RANKS} more ranks")
    lines += _fraction(config, forecast)
    lines += ["", "bytes that each rank sends in one optimizer step:"]
    lines += _table(_traffic_rows(predicted["comm_bytes_per_step"], shown[:_MOST_RANKS]))
    for name, what in _MOVES.items():
        by_rank = {rank: predicted[name][rank] for rank in shown[:_MOST_RANKS]}
        if any(sum(moved.values()) for moved in by_rank.values()):
            lines += ["", f"bytes that each rank {what} in one optimizer step:"]
            lines += _table(_traffic_rows(by_rank, list(by_rank)))
    lines += ["", forecast.verdict]
    return "\n".join(lines)


def _pipeline(config: Config, plan: PipelinePlan) -> list[str]:
    lines = [pipeline_head(config, plan)]
    lines += ["", "stages, and what each sends to the next in one optimizer step (and gets back):"]
    lines += _table(stage_rows(plan))
    idle = plan.simulation.bubble_fraction
    lines += ["", f"{idle:.1%} of the time idle ({COSTS}); kept for backward at most:"]
    lines += _table(rank_rows(plan))
    lines += gather_lines(config, plan)
    if plan.choice is not None:
        lines += ["", *str(plan.choice).splitlines()]
    return lines


def _precision(config: Config) -> str:
    p = config.precision
    master = f" with {p.master} master weights" if p.master != "none" else ""
    return f"compute {p.compute}{master}, gradients reduced in {p.reduce}"


def _state_rows(predicted: Mapping[str, Any], ranks: Sequence[str]) -> list[list[str]]:
    states = [predicted["state_bytes"][rank] for rank in ranks]
    columns = [
        (kind, word, tier) for kind, word in _KINDS for tier in _used_tiers(states, kind) or [_HOME]
    ]
    named = any(tier != _HOME for _, _, tier in columns)
    head = [f"{word} ({tier})" if named else word for _, word, tier in columns]
    rows = [["rank", *head, "together", "of it padding"]]
    for rank, state in zip(ranks, states, strict=True):
        sizes = [state.get(kind, {}).get(tier, 0) for kind, _, tier in columns]
        padding = (predicted.get("padding_bytes") or {}).get(rank)
        rows.append([rank, *map(human_bytes, [*sizes, sum(sizes), padding])])
    return rows


def _used_tiers(states: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    tiers = (_HOME, "cpu", "nvme")
    return [t for t in tiers if any(state.get(kind, {}).get(t) for state in states)]


def _fraction(config: Config, forecast: Forecast) -> list[str]:
    offload = config.offload
    if offload.optim_tier == "device" or offload.fraction == 1:
        return []
    return [
        f"offload.fraction {offload.fraction:g}: {forecast.offloaded:.1%} of the optimizer state "
        f"leaves the device (whole segments, the largest first)"
    ]


def _traffic_rows(
    by_rank: Mapping[str, Mapping[str, int]], ranks: Sequence[str]
) -> list[list[str]]:
    ways = sorted({way for rank in ranks for way in by_rank[rank]})
    rows = [["rank", *(way.replace("_", "-") for way in ways), "together"]]
    for rank in ranks:
        sizes = [by_rank[rank].get(way, 0) for way in ways]
        rows.append([rank, *map(human_bytes, [*sizes, sum(sizes)])])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
