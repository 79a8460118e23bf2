"""All forwards, then all backwards (Huang et al., arXiv:1811.06965)."""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind


def gpipe(stages: int, micro_batches: int, virtual: int = 1) -> list[list[Action]]:
    """Bubble (p-1)(F+B) per rank; every micro-batch is alive at the turn."""
    order = range(micro_batches)
    return [
        [
            *(Action(Kind.FORWARD, rank, m) for m in order),
            *(Action(Kind.BACKWARD, rank, m) for m in order),
        ]
        for rank in range(stages)
    ]
