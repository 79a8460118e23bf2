"""The picture of a sweep: throughput against peak memory, with the runs that no other run beats
in both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from zeroexp.report.row import Row


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (memory, throughput) that no other one equals or beats in both, by
    memory upwards.

    Less memory and more throughput are better.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    best = float("-inf")
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front


def write_plot(path: Path, rows: Sequence[Row]) -> Path | None:
    """Draw the runs that have both figures; None (and no file) with fewer than two, or without
    matplotlib.
    """
    shown = [row for row in rows if row.peak_bytes is not None and row.tokens_per_s is not None]
    if len(shown) < 2 or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [((row.peak_bytes or 0) / 2**20, row.tokens_per_s or 0.0) for row in shown]
    front = pareto_front(points)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        *zip(*[points[i] for i in front], strict=True),
        "-",
        color="0.7",
        label="Pareto front",
        zorder=1,
    )
    axes.scatter(*zip(*points, strict=True), zorder=2)
    for row, point in zip(shown, points, strict=True):
        label = ", ".join(row.differences.values()) or str(row.index)
        axes.annotate(label, point, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("peak memory of the largest rank (MiB)")
    axes.set_ylabel("tokens per second, all ranks")
    axes.margins(0.15)
    axes.legend(loc="best", frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
    return path
