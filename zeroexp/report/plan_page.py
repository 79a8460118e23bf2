"""``zeroexp plan``: what every rank will hold and send, and whether it fits, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroexp.config import Config
from zeroexp.run.forecast import Forecast
from zeroexp.run.record import human_bytes

_KINDS = (("params", "parameters"), ("grads", "gradients"), ("optim", "optimizer"))
# Ranks hold almost the same; more rows than this say nothing new.
_MOST_RANKS = 8


def plan_page(config: Config, forecast: Forecast | None) -> str:
    """State per rank, kind and tier; padding; traffic per step by collective; the verdict on
    memory.

    ``forecast`` None is a model that only its ranks can describe.
    """
    ranks = config.data_ranks
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
    lines.append(f"model {config.model.kind}: {forecast.num_params:,} parameters")
    predicted = forecast.predicted
    shown = sorted(predicted["state_bytes"], key=int)
    lines += ["", "state bytes that stay on each rank between steps (padding included):"]
    lines += _table(_state_rows(predicted, shown[:_MOST_RANKS]))
    if len(shown) > _MOST_RANKS:
        lines.append(f"  … and {len(shown) - _MOST_RANKS} more ranks")
    lines += ["", "bytes that each rank sends in one optimizer step:"]
    lines += _table(_traffic_rows(predicted, shown[:_MOST_RANKS]))
    lines += ["", forecast.verdict]
    return "\n".join(lines)


def _precision(config: Config) -> str:
    p = config.precision
    master = f" with {p.master} master weights" if p.master != "none" else ""
    return f"compute {p.compute}{master}, gradients reduced in {p.reduce}"


def _state_rows(predicted: Mapping[str, Any], ranks: Sequence[str]) -> list[list[str]]:
    tiers = [
        tier
        for tier in ("device", "cpu", "nvme")
        if tier == "device" or _is_used(predicted, ranks, tier)
    ]
    head = ["rank"]
    head += [f"{word} ({tier})" if len(tiers) > 1 else word for _, word in _KINDS for tier in tiers]
    rows = [[*head, "together", "of it padding"]]
    for rank in ranks:
        state = predicted["state_bytes"][rank]
        sizes = [state.get(kind, {}).get(tier, 0) for kind, _ in _KINDS for tier in tiers]
        padding = (predicted.get("padding_bytes") or {}).get(rank)
        rows.append([rank, *map(human_bytes, [*sizes, sum(sizes), padding])])
    return rows


def _is_used(predicted: Mapping[str, Any], ranks: Sequence[str], tier: str) -> bool:
    states = [predicted["state_bytes"][rank] for rank in ranks]
    return any(kind.get(tier) for state in states for kind in state.values())


def _traffic_rows(predicted: Mapping[str, Any], ranks: Sequence[str]) -> list[list[str]]:
    by_rank = predicted["comm_bytes_per_step"]
    ops = sorted({op for rank in ranks for op in by_rank[rank]})
    rows = [["rank", *(op.replace("_", "-") for op in ops), "together"]]
    for rank in ranks:
        sizes = [by_rank[rank].get(op, 0) for op in ops]
        rows.append([rank, *map(human_bytes, [*sizes, sum(sizes)])])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
