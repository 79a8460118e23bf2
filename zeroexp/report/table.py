"""Rows as a table: aligned text for a terminal, Markdown for a file. Every column says its unit
and what it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroexp.report.row import Row
from zeroexp.run.record import human_bytes


@dataclass(frozen=True)
class Column:
    """A heading and how a row fills it; numbers stand right."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_FIGURES = (
    Column("status", lambda row: row.status, right=False),
    Column("steps", lambda row: _number(row.steps, "d")),
    Column("loss", lambda row: _number(row.loss_last, ".4f")),
    Column("tokens/s", lambda row: _number(row.tokens_per_s, ",.0f")),
    Column("step (s)", lambda row: _number(row.step_time_median_s, ".4f")),
    Column("peak memory", lambda row: human_bytes(row.peak_bytes)),
    Column("state", lambda row: human_bytes(row.state_bytes)),
    Column("params", lambda row: human_bytes(row.params_bytes)),
    Column("grads", lambda row: human_bytes(row.grads_bytes)),
    Column("optim", lambda row: human_bytes(row.optim_bytes)),
    Column("sent/step", lambda row: human_bytes(row.comm_bytes_per_step)),
)

# Only where a run has state off its device.
_TIERS = (
    Column("on device", lambda row: human_bytes(row.state_on_device_bytes)),
    Column("on cpu", lambda row: human_bytes(row.state_on_cpu_bytes)),
    Column("on nvme", lambda row: human_bytes(row.state_on_nvme_bytes)),
)
# Only where a run has swap files.
_FILES = (
    Column("read/step", lambda row: human_bytes(row.io_read_bytes_per_step)),
    Column("written/step", lambda row: human_bytes(row.io_written_bytes_per_step)),
    Column("waited (s)", lambda row: _number(row.io_waited_s_per_step, ".4f")),
    Column("TB/day", lambda row: _number(row.written_tb_per_day, ".3g")),
)

LEGEND = (
    "loss: last step, mean over ranks | tokens/s: all ranks | step: median | both after warm-up\n"
    "memory, state, sent: of the rank with most; state = params + grads + optim, padding included"
)
_TIERS_LEGEND = "on device, on cpu, on nvme: the parts of state on each tier"
_FILES_LEGEND = (
    "read, written: of swap files, rank with most | waited: for them, mean of a step, rank that "
    "waited longest | TB/day: 10^12 bytes written at this rate, all ranks"
)


def _uses_tiers(rows: Sequence[Row]) -> bool:
    return any(row.state_on_cpu_bytes or row.state_on_nvme_bytes for row in rows)


def _uses_files(rows: Sequence[Row]) -> bool:
    return any(row.io_read_bytes_per_step or row.io_written_bytes_per_step for row in rows)


def _legend(rows: Sequence[Row]) -> list[str]:
    """What the figures count, a paragraph in lines."""
    lines = [LEGEND]
    lines += [_TIERS_LEGEND] if _uses_tiers(rows) else []
    return lines + ([_FILES_LEGEND] if _uses_files(rows) else [])


def columns_for(rows: Sequence[Row]) -> list[Column]:
    """The job's number, one column for each key in which the rows differ, and the figures."""
    keys = list(dict.fromkeys(key for row in rows for key in row.differences))
    differences = [
        Column(key, lambda row, key=key: row.differences.get(key, ""), right=False)  # type: ignore[misc]
        for key in keys
    ]
    return [Column("run", lambda row: str(row.index)), *differences, *_figures(rows)]


def _figures(rows: Sequence[Row]) -> list[Column]:
    tiers = _TIERS if _uses_tiers(rows) else ()
    return [*_FIGURES, *tiers, *(_FILES if _uses_files(rows) else ())]


def text_table(rows: Sequence[Row]) -> str:
    """Aligned columns; under them why each failed run failed."""
    columns = columns_for(rows)
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [
        max([len(column.heading), *(len(line[i]) for line in cells)])
        for i, column in enumerate(columns)
    ]

    def aligned(line: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = aligned([column.heading for column in columns])
    rule = "-" * len(head)
    return "\n".join([head, rule, *map(aligned, cells), *_legend(rows), *_reasons(rows)])


def markdown_table(rows: Sequence[Row]) -> str:
    """The same columns in Markdown, failures below."""
    columns = columns_for(rows)
    lines = [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "|" + "|".join("--:" if column.right else ":--" for column in columns) + "|",
    ]
    for row in rows:
        cells = (column.cell(row).replace("|", "\\|") for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    reasons = _reasons(rows)
    if reasons:
        reasons = ["", *(f"* {reason}" for reason in reasons)]
    return "\n".join([*lines, "", *_legend(rows), *reasons])


def _reasons(rows: Sequence[Row]) -> list[str]:
    return [
        f"run {row.index}: {row.status}: {' '.join(row.reason.split())}"
        for row in rows
        if row.reason
    ]
