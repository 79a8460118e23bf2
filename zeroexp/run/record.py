"""What a rank writes down while it trains: rows of metrics.jsonl, the progress line, and its
figures for the result.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeroexp.run.atomic import finite, read_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.reserve import write_last

#: Printed once before the first progress line: what its numbers count.
PROGRESS_LEGEND = (
    "loss: mean over ranks and micro-batches | tokens/s: all ranks | memory: peak of rank 0"
)


class MetricsWriter:
    """Appends rows to metrics.jsonl, one JSON object a line, each written through at once.

    A row that a killed process left half-written is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        _cut_half_line(path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; non-finite numbers become null."""
        try:
            self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        except OSError as error:  # which does not know its file
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        """Close the file; what a full disk did not take is lost."""
        with contextlib.suppress(OSError):
            self._file.close()


def _cut_half_line(path: Path) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of metrics.jsonl; empty without a file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1] if line]


# Where a figure of a row stands among the curves of a logger.
_SECTIONS = {
    "loss": "train",
    "auxiliary_loss": "train",
    "lr": "train",
    "grad_norm": "train",
    "grad_norm_clipped": "train",
    "loss_scale": "train",
    "skipped_steps": "train",
    "step_time_s": "speed",
    "tokens_per_s": "speed",
    "mfu": "speed",
    "io_gb_per_s": "speed",
    "io_waited_s": "speed",
    "peak_rss_bytes": "memory",
    "peak_device_bytes": "memory",
}


def logged_values(row: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, float]:
    """A row of metrics.jsonl as flat names for a logger: ``train/loss``, ``state_bytes/params``,
    ``sent_bytes/all_gather``, and the planner's figures as ``predicted_state_bytes/params``.

    ``predicted`` has ``state_bytes``, ``sent_bytes``, ``transfer_bytes`` and ``io_bytes`` in the
    shape that the row has. The last two have no curves where nothing moves. Experts have
    ``moe/<layer>/max_vio`` and the like, and ``moe_tokens/<layer>/<expert>``.
    """
    values = {
        f"{section}/{name}": row[name]
        for name, section in _SECTIONS.items()
        if row.get(name) is not None
    }
    for prefix, source in (("", row), ("predicted_", predicted)):
        for kind, tiers in (source.get("state_bytes") or {}).items():
            values[f"{prefix}state_bytes/{kind}"] = sum(tiers.values())
        for op, size in (source.get("sent_bytes") or {}).items():
            values[f"{prefix}sent_bytes/{op}"] = size
        for name in ("transfer_bytes", "io_bytes"):
            for way, size in (source.get(name) or {}).items():
                if size:
                    values[f"{prefix}{name}/{way}"] = size
    for path, layer in (row.get("moe") or {}).items():
        values |= _of_experts(path, layer)
    return values


def _of_experts(path: str, layer: Mapping[str, Any]) -> dict[str, float]:
    values = {f"moe/{path}/{name}": layer[name] for name in ("drop_rate", "max_vio")}
    if layer["all_to_all_bytes"]:
        values |= {f"moe/{path}/{n}": layer[n] for n in ("all_to_all_bytes", "all_to_all_seconds")}
    values |= {f"moe/{path}/{name}_loss": loss for name, loss in layer["losses"].items()}
    tokens = enumerate(layer["tokens_per_expert"])
    return values | {f"moe_tokens/{path}/{expert}": count for expert, count in tokens}


def human_bytes(count: float | None) -> str:
    """``1.50 GiB`` for 1610612736; ``-`` for None."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def human_seconds(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_line(
    step: int,
    max_steps: int | None,
    *,
    loss: float | None,
    tokens_per_s: float | None,
    memory_bytes: int | None,
    seconds_left: float | None = None,
) -> str:
    """``step   40/100 | loss 2.4173 | 31,250 tokens/s | memory 512.00 MiB | 0:12 left``."""
    steps = f"{step:>{len(str(max_steps))}}/{max_steps}" if max_steps else str(step)
    parts = [
        f"step {steps}",
        f"loss {loss:.4f}" if loss is not None else "loss -",
        f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s is not None else "- tokens/s",
        f"memory {human_bytes(memory_bytes)}",
    ]
    if seconds_left is not None:
        parts.append(f"{human_seconds(seconds_left)} left")
    return " | ".join(parts)


@dataclass
class RankFigures:
    """What one rank knows at the end of its run (or when it failed). Bytes and seconds; None:
    unknown.
    """

    rank: int
    steps: int = 0
    skipped_steps: int | None = None
    global_batch: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    #: what gates of experts add to the loss that is trained for; loss_last is without it
    auxiliary_loss_last: float | None = None
    val_loss: float | None = None
    grad_norm_before: float | None = None
    grad_norm_after: float | None = None
    loss_scale: float | None = None
    tokens_per_s: float | None = None
    step_time_s: dict[str, float | int | None] = field(
        default_factory=lambda: {"median": None, "p95": None, "n": 0}
    )
    mfu: dict[str, float | str | None] = field(
        default_factory=lambda: {"value": None, "peak_flops": None, "formula": None}
    )
    state_bytes: dict[str, dict[str, int]] | None = None
    padding_bytes: int | None = None
    peak_rss_bytes: int | None = None
    rss_baseline_bytes: int | None = None
    peak_device_bytes: int | None = None
    comm_bytes_per_step: dict[str, int] | None = None
    transfer_bytes_per_step: dict[str, int] | None = None
    io_bytes_per_step: dict[str, int] | None = None
    #: see :class:`zeroexp.run.disk_use.DiskUse`; None without swap files
    io: dict[str, Any] | None = None
    #: by layer: :class:`zeroexp.moe.Numbers` between the last two rows; None without experts
    moe: dict[str, dict[str, Any]] | None = None
    #: :attr:`zeroexp.engine.Engine.arrangement`; None without a pipeline
    pipeline: dict[str, Any] | None = None
    #: seconds since the epoch of the end of the first step: launch to first step
    first_step_at: float | None = None

    def write(self, directory: RunDirectory) -> None:
        """Replace launch/rankN.json."""
        write_last(directory, directory.figures(self.rank), asdict(self))


class ThrottledFigures:
    """Writes figures at most once a second while training goes on, so that a killed rank leaves its
    last state.
    """

    def __init__(
        self, directory: RunDirectory, figures: RankFigures, interval_s: float = 1.0
    ) -> None:
        self.figures = figures
        self._directory = directory
        self._interval = interval_s
        self._last = float("-inf")

    def update(self) -> None:
        if time.monotonic() - self._last >= self._interval:
            self.flush()

    def flush(self) -> None:
        self.figures.write(self._directory)
        self._last = time.monotonic()


def read_figures(directory: RunDirectory) -> dict[int, dict[str, Any]]:
    """The figures that ranks have left, by rank."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.launch.glob("rank*.json")):
        value = read_json(path)
        if value is not None:
            found[int(value["rank"])] = value
    return dict(sorted(found.items()))
