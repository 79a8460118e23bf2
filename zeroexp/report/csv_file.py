"""results.csv: one line a run, plain numbers in bytes and seconds, empty where unknown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from zeroexp.report.row import Row
from zeroexp.run.atomic import write_text


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all figures of ``rows``; the keys in which they differ come after the number of the
    run.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row.differences))
    figures = [field.name for field in fields(Row) if field.name not in ("index", "differences")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys, *figures])
    for row in rows:
        differences = [row.differences.get(key, "") for key in keys]
        values = [getattr(row, name) for name in figures]
        writer.writerow([row.index, *differences, *("" if v is None else v for v in values)])
    write_text(path, text.getvalue())
