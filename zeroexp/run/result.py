"""result.json: the numbers a sweep compares, put together from the ranks' figures, the status and
the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroexp.run.atomic import read_json, write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.disk_use import over_ranks
from zeroexp.run.record import read_figures
from zeroexp.run.status import Status

SCHEMA_VERSION = 1

# Figures that every rank has alike: rank 0 speaks for all (losses are means over the data ranks
# already).
_OF_RANK_0 = (
    "steps",
    "skipped_steps",
    "global_batch",
    "loss_first",
    "loss_last",
    "auxiliary_loss_last",
    "val_loss",
    "grad_norm_last",
    "loss_scale",
    "tokens_per_s",
    "step_time_s",
    "mfu",
    "moe",
    "pipeline",
)
# Figures that differ between ranks: {rank: figure}.
_OF_EACH_RANK = (
    "state_bytes",
    "padding_bytes",
    "peak_rss_bytes",
    "rss_baseline_bytes",
    "peak_device_bytes",
    "comm_bytes_per_step",
    "transfer_bytes_per_step",
    "io_bytes_per_step",
    "io",
)
_PREDICTED = (
    "state_bytes",
    "padding_bytes",
    "comm_bytes_per_step",
    "transfer_bytes_per_step",
    "io_bytes_per_step",
)


def assemble(
    *,
    config_digest: str,
    status: Status,
    figures: Mapping[int, Mapping[str, Any]],
    predicted: Mapping[str, Any] | None,
    ranks: int,
) -> dict[str, Any]:
    """The mapping of result.json (schema version 1); a rank without figures has null everywhere."""
    lead = dict(figures.get(0, {}))
    lead["grad_norm_last"] = {
        "before": lead.pop("grad_norm_before", None),
        "after": lead.pop("grad_norm_after", None),
    }
    lead.setdefault("steps", 0)
    lead.setdefault("step_time_s", {"median": None, "p95": None, "n": 0})
    lead.setdefault("mfu", {"value": None, "peak_flops": None, "formula": None})
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "config_digest": config_digest,
        "status": status.status,
        "reason": status.reason or None,
        "failed_rank": status.failed_rank,
    }
    for key in _OF_RANK_0:
        result[key] = lead.get(key)
    for key in _OF_EACH_RANK:
        result[key] = {str(rank): figures.get(rank, {}).get(key) for rank in range(ranks)}
    result["io_all_ranks"] = over_ranks(result["io"])
    result["predicted"] = {key: (predicted or {}).get(key) for key in _PREDICTED}
    return result


def write(
    directory: RunDirectory, *, config_digest: str, status: Status, ranks: int
) -> dict[str, Any]:
    """Assemble result.json from what lies in the run directory, write it atomically, and return
    it.
    """
    result = assemble(
        config_digest=config_digest,
        status=status,
        figures=read_figures(directory),
        predicted=read_json(directory.plan),
        ranks=ranks,
    )
    write_json(directory.result, result)
    return result
