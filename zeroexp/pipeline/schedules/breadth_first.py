"""Every stage runs all micro-batches before the next one begins (Lamy-Poirier, arXiv:2211.05953).

A rank's stage is then gathered once per pass, which is what ZeRO-3 inside a stage wants; the price
is GPipe's: all micro-batches are alive at the turn.
"""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind


def breadth_first(stages: int, micro_batches: int, virtual: int = 2) -> list[list[Action]]:
    """Bubble (p-1)(F+B)/v per rank when there are at least p micro-batches."""
    lists = []
    for rank in range(stages):
        chunks = range(rank, stages * virtual, stages)
        passes = [(Kind.FORWARD, chunks), (Kind.BACKWARD, reversed(chunks))]
        lists.append(
            [
                Action(kind, s, m)
                for kind, held in passes
                for s in held
                for m in range(micro_batches)
            ]
        )
    return lists
