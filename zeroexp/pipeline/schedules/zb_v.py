"""Two stages per rank, laid out as a V, with the backward split (ZB-V: Qi et al., arXiv:2401.10241,
section 6)."""

from __future__ import annotations

from zeroexp.pipeline.action import Action, Kind


def zb_v(stages: int, micro_batches: int, virtual: int = 2) -> list[list[Action]]:
    """No bubble inside a rank's work when F = I = W, 1F1B's memory: p micro-batches alive.

    Rank r holds stage r on the way down and stage 2p-1-r on the way up. Its first micro-batch is
    2(p-r)-1 forwards away from coming back up.
    """
    # The pattern needs 2p-1 micro-batches to close. With fewer, the surplus is left out: a
    # micro-batch depends on itself alone, so the rest keeps its order and stays valid.
    whole = max(micro_batches, 2 * stages - 1)
    return [
        [a for a in _full_list(rank, stages, whole) if (a.micro_batch or 0) < micro_batches]
        for rank in range(stages)
    ]


def _full_list(rank: int, stages: int, micro_batches: int) -> list[Action]:
    down, up = rank, 2 * stages - 1 - rank
    done: dict[tuple[Kind, int], int] = {}
    actions: list[Action] = []

    def run(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            m = done.get((kind, stage), 0)
            if m < micro_batches:
                done[kind, stage] = m + 1
                actions.append(Action(kind, stage, m))

    forward, first, second = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    for _ in range(2 * (stages - rank) - 1):
        run(down, forward)
    for _ in range(rank):
        run(up, forward)
        run(down, forward)
    for _ in range(stages - rank):
        run(up, forward, first, second)
    for _ in range(micro_batches - stages):
        run(down, forward, first, second)
        run(up, forward, first, second)
    # The gradients still under way come in one by one: weight gradients wait for the gaps.
    for _ in range(rank):
        run(down, first)
        run(up, first)
    for _ in range(stages - rank):
        run(down, first, second)
    for stage in (up, down):
        run(stage, *[second] * micro_batches)
    return actions
