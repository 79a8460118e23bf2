"""The groups of expert parallelism against published tables."""

from __future__ import annotations

import pytest

from zeroexp.errors import ConfigError
from zeroexp.moe.ranks import expert_ranks


def test_world_16_tensor_2_expert_4() -> None:
    """deepspeed.md 3.F case 98: the data-parallel ranks of each tensor lane are every second."""
    expert, replicas = [], []
    for lane in (0, 1):
        found = expert_ranks(range(lane, 16, 2), 4)
        expert += found.expert
        replicas += found.replicas
    assert expert == [(0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7), (9, 11, 13, 15)]
    assert replicas == [
        *[(0, 8), (2, 10), (4, 12), (6, 14)],
        *[(1, 9), (3, 11), (5, 13), (7, 15)],
    ]


def test_replicas_may_be_the_neighbours() -> None:
    """papers.md 2d, E+D against D+E: the same group sizes, the other one inside a node."""
    found = expert_ranks(range(8), 4, near="replicas")
    assert found.expert == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert found.replicas == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("near", ["expert", "replicas"])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 2), (4, 1), (6, 3), (8, 2), (8, 8)])
def test_every_expert_once_in_a_group_and_the_same_in_its_replicas(
    ranks: int, size: int, near: str
) -> None:
    found = expert_ranks(range(ranks), size, near=near)
    assert sorted(sum(found.expert, ())) == sorted(sum(found.replicas, ())) == list(range(ranks))
    place = {rank: group.index(rank) for group in found.expert for rank in group}
    assert all(len(group) == size for group in found.expert)
    for group in found.replicas:
        assert len(group) == ranks // size and len({place[rank] for rank in group}) == 1


@pytest.mark.parametrize("size", [0, 3, 4])
def test_a_size_that_does_not_divide_is_refused(size: int) -> None:
    """MO-08."""
    with pytest.raises(ConfigError, match=rf"{size} does not divide the 2 data.*use 1 or 2"):
        expert_ranks(range(2), size)
    with pytest.raises(ConfigError, match=r"'node' is not known.*use expert or replicas"):
        expert_ranks(range(2), 2, near="node")
