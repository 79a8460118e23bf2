"""One forward, one backward in turn, once the pipe is full (PipeDream-Flush: Narayanan et al.,
arXiv:2006.09503)."""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind


def one_f_one_b(stages: int, micro_batches: int, virtual: int = 1) -> list[list[Action]]:
    """GPipe's bubble, but rank r has min(m, p-r) micro-batches alive and never more."""
    lists = []
    for rank in range(stages):
        warm_up = min(micro_batches, stages - 1 - rank)
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(micro_batches)]
        backwards = [Action(Kind.BACKWARD, rank, m) for m in range(micro_batches)]
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        lists.append(actions + backwards[micro_batches - warm_up :])
    return lists
