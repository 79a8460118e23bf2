"""Reports over runs: a table for the terminal, results.csv, results.md, and the memory-
throughput picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroexp.report.csv_file import write_csv
from zeroexp.report.plot import write_plot
from zeroexp.report.row import Row
from zeroexp.report.table import markdown_table, text_table
from zeroexp.run.atomic import write_text

__all__ = ["write_report"]


def write_report(where: Path, rows: Sequence[Row]) -> str:
    """Write results.csv, results.md and memory_throughput.png into ``where``; the table for the
    terminal.
    """
    write_csv(where / "results.csv", rows)
    picture = write_plot(where / "memory_throughput.png", rows)
    text = f"# Results\n\n{markdown_table(rows)}\n"
    if picture is not None:
        text += f"\n![Throughput against peak memory]({picture.name})\n"
    write_text(where / "results.md", text)
    files = "results.csv, results.md" + (f", {picture.name}" if picture is not None else "")
    return f"{text_table(rows)}\n{files} in {where}"
