"""What the ranks that have all parts of something hold together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeroexp.comm import Group


def each_part(group: Group, mine: Tensor, *, tag: int, what: str) -> Iterator[Tensor]:
    """What every rank of ``group`` has in the place of ``mine``, one after the other
    (collective)."""
    for index in range(group.size):
        value = mine if index == group.index else torch.empty_like(mine)
        group.broadcast(value, source=index, tag=tag, what=what).wait()
        yield value


def needed(group: Group) -> bool:
    """Whether what ``group`` holds together is what rank 0 collects."""
    return 0 in group.ranks
