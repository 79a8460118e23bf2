"""A V of two stages per rank whose forwards and backwards come in pairs (DualPipe: DeepSeek-AI,
arXiv:2412.19437, section 3.2.1; cut in half to a V by Qi et al.).

A pair can hide one's all-to-all behind the other's compute, which is what it is for; run one after
the other, ZB-V has the smaller bubble and holds less.
"""

from __future__ import annotations

from collections import deque

from zeroexp.pipeline.action import Action, Kind


def dualpipe_v(stages: int, micro_batches: int, virtual: int = 2) -> list[list[Action]]:
    """The pairs as a forward and then a backward: p + 1/2 micro-batches alive. Only the backwards
    of the fill and of the drain's later half are split."""
    # As in ZB-V: the pattern closes with 2p micro-batches, a surplus is left out.
    whole = max(micro_batches, 2 * stages)
    return [
        [a for a in _full_list(rank, stages, whole) if (a.micro_batch or 0) < micro_batches]
        for rank in range(stages)
    ]


def _full_list(rank: int, stages: int, micro_batches: int) -> list[Action]:
    down, up = rank, 2 * stages - 1 - rank
    below = stages - 1 - rank
    forwards, backwards = {down: 0, up: 0}, {down: 0, up: 0}
    owed: deque[Action] = deque()
    actions: list[Action] = []

    def forward(stage: int) -> None:
        actions.append(Action(Kind.FORWARD, stage, forwards[stage]))
        forwards[stage] += 1

    def backward(stage: int, *, split: bool = False) -> None:
        m = backwards[stage]
        backwards[stage] += 1
        actions.append(Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, stage, m))
        if split:
            owed.append(Action(Kind.BACKWARD_WEIGHT, stage, m))

    for _ in range(2 * below):
        forward(down)
    for _ in range(rank + 1):
        forward(down)
        forward(up)
    for _ in range(below):
        backward(up, split=True)
        actions.append(owed.popleft())
        forward(up)
    for _ in range(micro_batches - 2 * stages + rank + 1):
        forward(down)
        backward(up)
        forward(up)
        backward(down)
    for _ in range(below):
        backward(up)
        forward(up)
        backward(down)
    # The drain: the later half of the backwards is split, and their weight gradients fill its gaps.
    for i in range(2 * (rank + 1)):
        backward(down if i % 2 else up, split=i > rank)
    for _ in range(below):
        actions.append(owed.popleft())
        backward(down, split=True)
    return [*actions, *owed]
