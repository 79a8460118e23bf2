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

LEGEND = (
    "loss: last step, mean over ranks | tokens/s: all ranks | step: median | both after warm-up\n"
    "memory, state, sent: of the rank with most; state = params + grads + optim, padding included"
)


def columns_for(rows: Sequence[Row]) -> list[Column]:
    """The job's number, one column for each key in which the rows differ, and the figures."""
    keys = list(dict.fromkeys(key for row in rows for key in row.differences))
    differences = [
        Column(key, lambda row, key=key: row.differences.get(key, ""), right=False)  # type: ignore[misc]
        for key in keys
    ]
    return [Column("run", lambda row: str(row.index)), *differences, *_FIGURES]


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
    return "\n".join([head, rule, *map(aligned, cells), LEGEND, *_reasons(rows)])


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
    return "\n".join([*lines, "", LEGEND, *reasons])


def _reasons(rows: Sequence[Row]) -> list[str]:
    return [
        f"run {row.index}: {row.status}: {' '.join(row.reason.split())}"
        for row in rows
        if row.reason
    ]
