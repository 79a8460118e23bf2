"""One run as a row: what set it apart, how it ended, and the figures that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zeroexp.run import status
from zeroexp.run.atomic import read_json
from zeroexp.run.directory import RunDirectory


@dataclass(frozen=True)
class Row:
    """A run in a report. Bytes and seconds; None: unknown. Figures that differ by rank are those
    of the largest.
    """

    index: int
    differences: Mapping[str, str]
    status: str
    reason: str = ""
    failed_rank: int | None = None
    directory: Path | None = None
    steps: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    step_time_median_s: float | None = None
    step_time_p95_s: float | None = None
    mfu: float | None = None
    #: device memory where there is a device, else resident memory of the process
    peak_bytes: int | None = None
    #: resident memory above what the process took before model and data were made
    peak_above_baseline_bytes: int | None = None
    params_bytes: int | None = None
    grads_bytes: int | None = None
    optim_bytes: int | None = None
    state_bytes: int | None = None
    predicted_state_bytes: int | None = None
    #: sent in one step, all collectives but the control traffic
    comm_bytes_per_step: int | None = None
    #: state of the rank that holds most, by tier
    state_on_device_bytes: int | None = None
    state_on_cpu_bytes: int | None = None
    state_on_nvme_bytes: int | None = None
    #: of swap files, in one step
    io_read_bytes_per_step: int | None = None
    io_written_bytes_per_step: int | None = None
    #: of the rank whose steps waited longest for swap files
    io_waited_s_per_step: float | None = None
    #: over all ranks, 10^12 bytes
    written_tb_per_day: float | None = None
    config_digest: str = field(default="")


def row_of(directory: RunDirectory, index: int, differences: Mapping[str, str]) -> Row:
    """The row of the run in ``directory``; a run without result.json has its status and nothing
    else.
    """
    found = status.read(directory)
    result = read_json(directory.result) or {}
    state = _largest(result.get("state_bytes"))
    predicted = _largest((result.get("predicted") or {}).get("state_bytes"))
    peaks = _numbers(result.get("peak_rss_bytes"))
    baselines = _numbers(result.get("rss_baseline_bytes"))
    device_peaks = _numbers(result.get("peak_device_bytes"))
    sent = [_sent(by_op) for by_op in (result.get("comm_bytes_per_step") or {}).values() if by_op]
    times = result.get("step_time_s") or {}
    files = [moved for moved in (result.get("io_bytes_per_step") or {}).values() if moved]
    waited = [io["waited_s_per_step"] for io in (result.get("io") or {}).values() if io]
    return Row(
        index=index,
        differences=dict(differences),
        status=found.status if found is not None else "none",
        reason=found.reason if found is not None else "no status.json",
        failed_rank=found.failed_rank if found is not None else None,
        directory=directory.path,
        steps=result.get("steps"),
        loss_first=result.get("loss_first"),
        loss_last=result.get("loss_last"),
        val_loss=result.get("val_loss"),
        tokens_per_s=result.get("tokens_per_s"),
        step_time_median_s=times.get("median"),
        step_time_p95_s=times.get("p95"),
        mfu=(result.get("mfu") or {}).get("value"),
        peak_bytes=max((device_peaks or peaks).values(), default=None),
        peak_above_baseline_bytes=max(
            (peak - baselines[rank] for rank, peak in peaks.items() if rank in baselines),
            default=None,
        ),
        params_bytes=_kind(state, "params"),
        grads_bytes=_kind(state, "grads"),
        optim_bytes=_kind(state, "optim"),
        state_bytes=_total(state),
        predicted_state_bytes=_total(predicted),
        comm_bytes_per_step=max(sent, default=None),
        state_on_device_bytes=_on_tier(state, "device"),
        state_on_cpu_bytes=_on_tier(state, "cpu"),
        state_on_nvme_bytes=_on_tier(state, "nvme"),
        io_read_bytes_per_step=max((moved["read"] for moved in files), default=None),
        io_written_bytes_per_step=max((moved["written"] for moved in files), default=None),
        io_waited_s_per_step=max((s for s in waited if s is not None), default=None),
        written_tb_per_day=(result.get("io_all_ranks") or {}).get("written_tb_per_day"),
        config_digest=str(result.get("config_digest") or ""),
    )


def _numbers(by_rank: Any) -> dict[str, int]:
    return {rank: value for rank, value in (by_rank or {}).items() if value is not None}


def _largest(by_rank: Any) -> Mapping[str, Mapping[str, int]] | None:
    """The state of the rank that holds most."""
    states = [state for state in (by_rank or {}).values() if state is not None]
    return max(states, key=lambda state: _total(state) or 0, default=None)


def _kind(state: Mapping[str, Mapping[str, int]] | None, kind: str) -> int | None:
    return None if state is None else sum(state.get(kind, {}).values())


def _on_tier(state: Mapping[str, Mapping[str, int]] | None, tier: str) -> int | None:
    return None if state is None else sum(tiers.get(tier, 0) for tiers in state.values())


def _total(state: Mapping[str, Mapping[str, int]] | None) -> int | None:
    return None if state is None else sum(sum(tiers.values()) for tiers in state.values())


def _sent(by_op: Mapping[str, int]) -> int:
    return sum(size for op, size in by_op.items() if op != "control")


def differing(lines: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """For each command line, its ``key=value`` words that not all lines have, in the order they
    were written.
    """
    pairs = [dict(word.partition("=")[::2] for word in line) for line in lines]
    keys = list(dict.fromkeys(key for line in pairs for key in line))
    varying = [key for key in keys if len({line.get(key) for line in pairs}) > 1]
    return [{key: line[key] for key in varying if key in line} for line in pairs]


def rows_below(paths: Sequence[Path]) -> list[Row]:
    """Rows of all runs in ``paths``: run directories, sweeps, or directories that hold some of
    these.
    """
    runs = sorted({run for path in paths for run in _runs_in(path)})
    words = [_flat_config(RunDirectory(run)) for run in runs]
    return [
        row_of(RunDirectory(run), index, difference)
        for index, (run, difference) in enumerate(zip(runs, differing(words), strict=True))
    ]


def _runs_in(path: Path) -> list[Path]:
    if RunDirectory(path).status.is_file():
        return [path]
    return [found.parent for found in path.rglob("status.json")] if path.is_dir() else []


# Sections that say where and how a run was carried out rather than what it computed.
_SILENT = ("paths.", "launch.", "logger.", "tag", "name")


def _flat_config(directory: RunDirectory) -> list[str]:
    try:
        tree = yaml.safe_load(directory.config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return []
    return [word for word in _flatten(tree, "") if not word.startswith(_SILENT)]


def _flatten(node: Any, prefix: str) -> list[str]:
    if isinstance(node, dict):
        return [word for key, value in node.items() for word in _flatten(value, f"{prefix}{key}.")]
    return [f"{prefix[:-1]}={node}"]
