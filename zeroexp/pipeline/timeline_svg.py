"""The timeline of a simulated schedule as SVG: one row a rank, one box an action."""

from __future__ import annotations

import math
from html import escape

from zeroexp.pipeline.action import Kind
from zeroexp.pipeline.simulate import Simulation, Timed

# (fill, text) of a rank's first, third … stage and of its second, fourth …: told apart with any
# colour vision (a test computes how far apart), and by lightness in grey print.
COLOURS: dict[Kind, tuple[tuple[str, str], tuple[str, str]]] = {
    Kind.FORWARD: (("#56b4e9", "#000000"), ("#aadaf4", "#000000")),
    Kind.BACKWARD: (("#e69f00", "#000000"), ("#f2cf80", "#000000")),
    Kind.BACKWARD_INPUT: (("#7a3d00", "#ffffff"), ("#bc9e80", "#000000")),
    Kind.BACKWARD_WEIGHT: (("#004c77", "#ffffff"), ("#80a6bb", "#000000")),
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
_ROW, _GAP, _TOP, _LEFT, _RIGHT = 26, 6, 40, 60, 150
# A digit of the 11-point font needs about this many pixels.
_DIGIT = 7


def timeline_svg(simulation: Simulation, width: int = 1200) -> str:
    """An SVG document of ``width`` pixels: boxes with micro-batch numbers (and a tooltip with
    stage and times), hatched idle time, each rank's idle share and peak, a time axis, a legend."""
    schedule = simulation.schedule
    rows = schedule.num_ranks * (_ROW + _GAP)
    height = _TOP + rows + 30
    plot = max(1, width - _LEFT - _RIGHT)
    scale = plot / simulation.makespan if simulation.makespan else 0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(_title(simulation))}</title>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f4f4"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#c8c8c8" stroke-width="2"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(simulation),
    ]
    for rank in range(schedule.num_ranks):
        top = _TOP + rank * (_ROW + _GAP)
        parts.append(_text(8, top + 17, f"rank {rank}"))
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{plot}" height="{_ROW}" fill="url(#idle)"/>'
        )
        parts += [_box(simulation, timed, top, scale) for timed in simulation.timeline[rank]]
        share = simulation.idle[rank] / simulation.makespan if simulation.makespan else 0
        note = f"{share:.0%} idle, {simulation.peak_activations[rank]:.4g} alive"
        parts.append(_text(_LEFT + plot + 10, top + 17, note))
    parts += _axis(simulation, _TOP + rows, scale)
    return "\n".join([*parts, "</svg>", ""])


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.micro_batches} micro-batches"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#000000") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )


def _box(simulation: Simulation, timed: Timed, top: float, scale: float) -> str:
    action = timed.action
    x, size = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    colour, ink = COLOURS[action.kind][simulation.schedule.chunk_of(action.stage) % 2]
    number = str(action.micro_batch)
    label = ""
    if size >= _DIGIT * len(number) + 2:
        label = _text(x + size / 2, top + 17, number, "middle", ink)
    tip = (
        f"{_NAMES[action.kind]}, stage {action.stage}, micro-batch {number}: "
        f"{timed.start:.4g} to {timed.end:.4g}"
    )
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{top}" width="{size:.2f}" height="{_ROW}" '
        f'fill="{colour}" stroke="#333333" stroke-width="0.6"/>{label}</g>'
    )


def _legend(simulation: Simulation) -> list[str]:
    used = {timed.action.kind for line in simulation.timeline for timed in line}
    parts, x = [], float(_LEFT)
    entries = [(COLOURS[kind][0][0], _NAMES[kind]) for kind in COLOURS if kind in used]
    if simulation.schedule.virtual > 1:
        entries.append((COLOURS[Kind.FORWARD][1][0], "light: every second stage of a rank"))
    for fill, name in [*entries, ("url(#idle)", "idle")]:
        parts.append(
            f'<rect x="{x:.1f}" y="12" width="14" height="14" fill="{fill}" stroke="#333333" '
            'stroke-width="0.6"/>'
        )
        parts.append(_text(x + 19, 23, name))
        x += 19 + 6.5 * len(name) + 16
    return parts


def _axis(simulation: Simulation, y: float, scale: float) -> list[str]:
    """About ten ticks at round times."""
    if not simulation.makespan:
        return []
    rough = simulation.makespan / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    parts = []
    for tick in range(math.floor(simulation.makespan / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 5:.1f}" stroke="#333333"/>'
        )
        parts.append(_text(x, y + 18, f"{tick * step:.4g}", "middle"))
    return parts
