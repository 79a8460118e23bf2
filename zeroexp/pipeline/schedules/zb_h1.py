"""1F1B with the backward split: weight gradients wait until they fill the bubble (ZB-H1: Qi et
al., arXiv:2401.10241, section 2.3)."""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind
from zeroexp.pipeline.schedules.interleaved import mirrored, stage_order


def zb_h1(stages: int, micro_batches: int, virtual: int = 1) -> list[list[Action]]:
    """Bubble (p-1)(F+I-W)/v per rank and 1F1B's memory: at most p micro-batches alive.

    Rank r owes r weight gradients while the pipe is full, so it starts its last input gradient as
    early as the chain of them allows and has r weight gradients to do after it.
    """
    lists = []
    for rank in range(stages):
        order = stage_order(rank, stages, micro_batches, virtual)
        back = mirrored(order, stages * virtual, rank, stages)
        warm_up = min(len(order), (virtual - 1) * stages + stages - 1 - rank)
        actions = [Action(Kind.FORWARD, s, m) for s, m in order[:warm_up]]
        for i, (stage, m) in enumerate(back):
            if warm_up + i < len(order):
                actions.append(Action(Kind.FORWARD, *order[warm_up + i]))
            actions.append(Action(Kind.BACKWARD_INPUT, stage, m))
            if i >= rank:
                actions.append(Action(Kind.BACKWARD_WEIGHT, *back[i - rank]))
        owed = back[max(0, len(back) - rank) :]
        lists.append(actions + [Action(Kind.BACKWARD_WEIGHT, s, m) for s, m in owed])
    return lists
