"""1F1B over several stages per rank, p micro-batches of one stage at a time (Narayanan et al.,
arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind


def stage_order(rank: int, stages: int, micro_batches: int, virtual: int) -> list[tuple[int, int]]:
    """(stage, micro-batch) of a rank's forwards: groups of p micro-batches, each group through all
    of the rank's stages before the next group. Backwards mirror the stages within a group."""
    return [
        (chunk * stages + rank, m)
        for group in range(0, micro_batches, stages)
        for chunk in range(virtual)
        for m in range(group, min(group + stages, micro_batches))
    ]


def mirrored(
    order: list[tuple[int, int]], num_stages: int, rank: int, stages: int
) -> list[tuple[int, int]]:
    """The same order with a rank's last stage in the place of its first."""
    top = num_stages - stages + rank
    return [(top - (stage - rank), m) for stage, m in order]


def interleaved(stages: int, micro_batches: int, virtual: int = 2) -> list[list[Action]]:
    """Bubble (p-1)(F+B)/v per rank, p(1 + (p-1)/(pv)) micro-batches alive on rank 0, v times the
    transfers. ``micro_batches`` is a multiple of ``stages``."""
    lists = []
    for rank in range(stages):
        order = stage_order(rank, stages, micro_batches, virtual)
        forwards = [Action(Kind.FORWARD, s, m) for s, m in order]
        backwards = [
            Action(Kind.BACKWARD, s, m) for s, m in mirrored(order, stages * virtual, rank, stages)
        ]
        # Twice the distance to the last rank: its gradient of the rank's last stage is then just
        # arriving, and the steady state does not wait.
        warm_up = min(len(order), 2 * (stages - 1 - rank) + (virtual - 1) * stages)
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        lists.append(actions + backwards[len(order) - warm_up :])
    return lists
