"""The short table in README.md: what was measured, by whom it can be checked, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.modes import MODES
from benchmarks.summary import LOSS_TOLERANCE, Spread, WorkResult
from benchmarks.table import NAMED_PEER, origin

BEGIN = "<!-- benchmarks: written by `python -m benchmarks table`, do not edit -->"
END = "<!-- benchmarks end -->"

NOTHING_YET = (
    "No result file is committed yet. `python -m benchmarks train gpt10 mlp gpt125` measures and "
    "`python -m benchmarks table` puts the table here; until then nothing is claimed."
)

MORE = (
    "[docs/benchmarks.md](docs/benchmarks.md) has all modes, the kernel, and each target, met or "
    "not."
)

# The rows of a table, each peer above the stages that do what it does.
ROWS = ("ddp", "zro", "ds1", "ds2", "fsdp", "ds3", "zx0", "zx1", "zx2", "zx3")
HEADER = "| | step s | to DDP | to its peer | state B/param | peak B/param |"


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}..{spread.high:.2f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _compared(result: WorkResult, mode: str, peer: str | None) -> str:
    """The ratio of step times, or why it says nothing."""
    if peer is None or mode == peer:
        return ""
    difference = result.loss_difference(mode, peer)
    if difference is not None and difference > LOSS_TOLERANCE:
        return f"losses differ by {difference:.0e}"
    return _ratio(result.ratio(mode, peer))


def row(result: WorkResult, mode: str) -> str:
    """One mode as a table row; a mode that did not run says so and why."""
    label = MODES[mode].label
    step = result.step_seconds(mode)
    if step is None:
        return f"| {label} | missing: {' '.join(result.reason(mode).split())} |" + " |" * 4
    peer = NAMED_PEER.get(mode)
    beside = _compared(result, mode, peer)
    cells = (
        label,
        f"{step.median:.3f}",
        _compared(result, mode, "ddp"),
        f"{beside} of {MODES[peer].label}" if peer and beside else "",
        _number(result.bytes_per_param(mode, "state")),
        _number(result.peak_bytes_per_param(mode)),
    )
    return "| " + " | ".join(cells) + " |"


def section(files: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for the parsed result files; without a training result, that there is none."""
    lines: list[str] = []
    for file in files:
        if file["kind"] != "training":
            continue
        result, settings = WorkResult(file["work"]), file["settings"]
        lines += [
            f"**{result.title}** ({result.num_params / 1e6:.1f} million parameters, fp32, AdamW, "
            f"{settings['world_size']} ranks on one host over gloo, {settings['threads']} "
            f"thread{'s' if settings['threads'] > 1 else ''} each)",
            "",
            HEADER,
            "|-|-|-|-|-|-|",
            *(row(result, mode) for mode in ROWS),
            "",
            origin(file),
            "",
        ]
    return "\n".join([*lines, MORE]) if lines else NOTHING_YET


def write(files: Sequence[Mapping[str, Any]], readme: Path) -> None:
    """Replace what stands between the two markers of ``readme``.

    Raises ``ValueError`` when the markers are not there once each and in order.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"{readme} needs one line {BEGIN!r} and after it one line {END!r}")
    readme.write_text(f"{before}{BEGIN}\n\n{section(files)}\n\n{END}{after}")
