"""Draw zero_stages.png from zero_stages.csv, the results.csv of a sweep over the ZeRO stages:

python docs/images/zero_stages.py [RESULTS_CSV [PNG]]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).parent
MIB = 2**20
KINDS = (
    ("optim_bytes", "optimizer state", "#4477aa"),
    ("grads_bytes", "gradients", "#66ccee"),
    ("params_bytes", "parameters", "#ccbb44"),
)


def plain(axes: Axes, title: str) -> None:
    """Titles on the left, no frame but the ground line, no ticks where bars carry their figures."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="both", length=0)
    axes.set_yticks([])
    axes.margins(y=0.12)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    stages = [row["zero"].removeprefix("stage") for row in rows]
    names = [f"stage {stage}" for stage in stages]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    state, peak, sent = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))

    bottom = [0.0] * len(rows)
    for key, label, colour in KINDS:
        sizes = [int(row[key]) / MIB for row in rows]
        state.bar(names, sizes, 0.62, bottom, color=colour, label=label)
        for x, (size, base) in enumerate(zip(sizes, bottom, strict=True)):
            colour_of_text = "white" if key == "optim_bytes" else "black"
            state.text(x, base + size / 2, f"{size:.0f}", ha="center", va="center", fontsize=8,
                       color=colour_of_text)  # fmt: skip
        bottom = [base + size for base, size in zip(bottom, sizes, strict=True)]
    for x, total in enumerate(bottom):
        state.text(x, total, f"{total:.0f}\n", ha="center", va="center", weight="bold", fontsize=9)
    plain(state, "state held per rank (MiB)")
    state.legend(frameon=False, fontsize=8, loc="upper right", reverse=True)

    for axes, key, title in (
        (peak, "peak_above_baseline_bytes", "peak memory per rank (MiB)*"),
        (sent, "comm_bytes_per_step", "sent per rank and step (MiB)"),
    ):
        sizes = [int(row[key]) / MIB for row in rows]
        bars = axes.bar(names, sizes, 0.62, color="0.72")
        axes.bar_label(bars, fmt="%.0f", fontsize=9)
        plain(axes, title)
    figure.supxlabel(
        "* resident memory above what interpreter and libraries took", fontsize=8, ha="right", x=1
    )
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    source = Path(arguments[0]) if arguments else HERE / "zero_stages.csv"
    target = Path(arguments[1]) if len(arguments) > 1 else HERE / "zero_stages.png"
    with source.open(newline="") as file:
        draw(list(csv.DictReader(file)), target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
