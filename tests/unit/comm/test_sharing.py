"""Who shares what, against published tables and by counting."""

from __future__ import annotations

import itertools

import pytest

from zeroexp.comm.sharing import group_of, shared_ranks
from zeroexp.errors import RankMismatch
from zeroexp.layout import ParamSpec, make_unit


def test_world_16_tensor_2_expert_4() -> None:
    """deepspeed.md 3.F case 98: the data-parallel ranks of each tensor lane are every second."""
    blocks, members = [], []
    for lane in (0, 1):
        found = shared_ranks(range(lane, 16, 2), 8, 4)
        blocks += found.blocks
        members += found.members
    assert blocks == [(0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7), (9, 11, 13, 15)]
    assert members == [
        *[(0, 8), (2, 10), (4, 12), (6, 14)],
        *[(1, 9), (3, 11), (5, 13), (7, 15)],
    ]


SIZES = [
    (ranks, shard, spread)
    for ranks, shard, spread in itertools.product((1, 2, 4, 6, 8, 12), repeat=3)
    if ranks % shard == 0 and ranks % spread == 0 and (shard % spread == 0 or spread % shard == 0)
]


@pytest.mark.parametrize(("ranks", "shard", "spread"), SIZES)
def test_a_copy_has_every_shard_of_every_part_once(ranks: int, shard: int, spread: int) -> None:
    found = shared_ranks(range(ranks), shard, spread)
    for partition in found:
        assert sorted(sum(partition, ())) == list(range(ranks))
        assert len({len(group) for group in partition}) == 1
    (segment,) = make_unit("", [ParamSpec("w", (3,), spread=spread)], shard).segments
    assert segment.shards == len(found.shards[0])

    def holds(rank: int) -> tuple[int, int]:
        """Part and shard of it."""
        part = group_of(found.blocks, rank).index(rank)
        gather = group_of(found.shards, rank)
        assert segment.index_of(rank) == gather.index(rank)
        assert {group_of(found.blocks, other).index(other) for other in gather} == {part}
        return part, gather.index(rank)

    for rank in range(ranks):
        assert {holds(other) for other in group_of(found.replicas, rank)} == {holds(rank)}
        members = group_of(found.members, rank)
        assert {holds(other)[0] for other in members} == {holds(rank)[0]}
    # What World counts for the norm: neighbours that are one copy
    copy = max(shard, spread)
    for first in range(0, ranks, copy):
        held = [holds(rank) for rank in range(first, first + copy)]
        assert sorted(held) == sorted(itertools.product(range(spread), range(segment.shards)))


def test_sizes_that_do_not_fit_are_refused() -> None:
    """MO-08."""
    with pytest.raises(RankMismatch, match="over 3 ranks do not fit the 2 data-parallel ranks"):
        shared_ranks(range(2), 2, 3)
    with pytest.raises(RankMismatch, match=r"3 ranks and zero.shard_size=2 do not fit"):
        shared_ranks(range(6), 2, 3)
