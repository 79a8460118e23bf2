"""Lists of forwards alone, for an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.pipeline.action import Action, Kind


def forward_lists(rank_of: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Each rank's forwards and transfers, micro-batch by micro-batch.

    All ranks' actions follow one sequence, so no order of blocking transfers can stop. With one
    stage per rank the pipe is full; with more, a rank waits for its micro-batch to come round.
    """
    lists: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    last = len(rank_of) - 1
    for m in range(micro_batches):
        for stage, rank in enumerate(rank_of):
            if stage and rank_of[stage - 1] != rank:
                lists[rank].append(Action(Kind.RECV_ACTIVATION, stage, m))
            lists[rank].append(Action(Kind.FORWARD, stage, m))
            if stage < last and rank_of[stage + 1] != rank:
                lists[rank].append(Action(Kind.SEND_ACTIVATION, stage, m))
    return lists
