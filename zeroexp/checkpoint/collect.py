"""What the ranks that have all shares of something hold together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeroexp.comm import Group, World


def each_share(group: Group, mine: Tensor, *, tag: int, what: str) -> Iterator[Tensor]:
    """What every rank of ``group`` has in the place of ``mine``, one after the other
    (collective)."""
    for index in range(group.size):
        value = mine if index == group.index else torch.empty_like(mine)
        group.broadcast(value, source=index, tag=tag, what=what).wait()
        yield value


def needed(world: World, group: Group) -> bool:
    """Whether what ``group`` holds together is what the first data-parallel rank collects."""
    return world.control.ranks[0] in group.ranks
