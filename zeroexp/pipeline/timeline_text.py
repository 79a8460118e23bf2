"""The timeline of a simulated schedule for a terminal: one line a rank."""

from __future__ import annotations

import math
import textwrap

from zeroexp.pipeline.simulate import Simulation, Timed

LEGEND = "F forward  B backward  I input gradient  W weight gradient  . idle"
_FILL, _IDLE = "-", "."


def timeline_text(simulation: Simulation, width: int = 100) -> str:
    """Letters and micro-batch numbers along the time, ``.`` where a rank idles, no line longer than
    ``width`` characters; then each rank's idle share and its activations at the peak.

    Letters of a rank's second, fourth … stage are small. What is too short for its number shows the
    letter only.
    """
    ranks = range(simulation.schedule.num_ranks)
    heads = [f"rank {rank:<{len(str(len(ranks) - 1))}} |" for rank in ranks]
    tails = [_tail(simulation, rank) for rank in ranks]
    room = max(1, width - len(heads[0]) - 2 - max(map(len, tails)))
    columns = min(room, _columns_wanted(simulation))
    lines = [
        f"{heads[rank]}{_line(simulation, rank, columns)}| {tails[rank]}"[:width] for rank in ranks
    ]
    legend = LEGEND
    if simulation.schedule.virtual > 1:
        legend += "\nsmall letters: every second stage of a rank"
    wrapped = [part for line in legend.split("\n") for part in textwrap.wrap(line, width)]
    return "\n".join([*lines, *wrapped])


def _tail(simulation: Simulation, rank: int) -> str:
    share = simulation.idle[rank] / simulation.makespan if simulation.makespan else 0
    return f"{share:4.0%} idle, {simulation.peak_activations[rank]:.4g} alive"


def _columns_wanted(simulation: Simulation) -> int:
    """Enough for the shortest action to show its letter and number."""
    digits = len(str(max(0, simulation.schedule.micro_batches - 1)))
    lengths = [t.end - t.start for line in simulation.timeline for t in line if t.end > t.start]
    if not lengths:
        return 1
    # A whole number of columns per shortest action: equal actions look equal.
    return max(1, math.ceil((1 + digits) * simulation.makespan / min(lengths) - 1e-9))


def _line(simulation: Simulation, rank: int, columns: int) -> str:
    cells = [_IDLE] * columns
    scale = columns / simulation.makespan if simulation.makespan else 0
    for timed in simulation.timeline[rank]:
        start, end = (round(moment * scale) for moment in (timed.start, timed.end))
        text = _label(simulation, timed)
        size = end - start
        shown = text if len(text) <= size else text[:1]
        cells[start:end] = shown.ljust(size, _FILL)[:size]
    return "".join(cells)


def _label(simulation: Simulation, timed: Timed) -> str:
    action = timed.action
    letter = action.kind.value
    if simulation.schedule.chunk_of(action.stage) % 2:
        letter = letter.lower()
    return f"{letter}{action.micro_batch}"
