"""Which ranks hold which share of a kind of parameters, and the groups they do it in.

Most parameters are the same on every data-parallel rank. Those of experts are spread: ``spread``
neighbours hold a share each (other experts), and ranks at the same place of such a block hold the
same share. ZeRO then shards a share over the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroexp.comm.group import Group
from zeroexp.errors import RankMismatch

Partition = Sequence[tuple[int, ...]]
"""Every rank in one group."""


class SharedRanks(NamedTuple):
    """Partitions of the data-parallel ranks.

    ``blocks``: each group holds all shares once. ``members``: each holds one share. ``shards``:
    those a share is sharded over. ``replicas``: those that hold the same shard.
    """

    blocks: Partition
    members: Partition
    shards: Partition
    replicas: Partition


def shared_ranks(data: Sequence[int], shard_size: int, spread: int = 1) -> SharedRanks:
    """Cut the data-parallel ranks ``data``, ``shard_size`` of which hold one sharded copy of the
    model, for parameters that are spread over blocks of ``spread`` ranks.

    A copy of such parameters lies inside the ``shard_size`` ranks too, or each rank holds its share
    unsharded where there are fewer. Raises :class:`RankMismatch` when the numbers do not divide.
    """
    ranks = len(data)
    if ranks % spread:
        raise RankMismatch(
            f"experts spread over {spread} ranks do not fit the {ranks} data-parallel ranks: "
            f"{spread} does not divide {ranks}"
        )
    if shard_size % spread and spread % shard_size:
        raise RankMismatch(
            f"experts spread over {spread} ranks and zero.shard_size={shard_size} do not fit "
            "together: make one divide the other"
        )
    shards = max(1, shard_size // spread)
    members = [tuple(data[i::spread]) for i in range(spread)]
    return SharedRanks(
        blocks=tuple(tuple(data[i : i + spread]) for i in range(0, ranks, spread)),
        members=tuple(members),
        shards=tuple(m[i : i + shards] for m in members for i in range(0, len(m), shards)),
        replicas=tuple(m[i::shards] for m in members for i in range(shards)),
    )


def group_of(partition: Partition, rank: int) -> tuple[int, ...]:
    """The group of ``partition`` that ``rank`` is in."""
    return next(ranks for ranks in partition if rank in ranks)


@dataclass(frozen=True)
class Sharing:
    """The groups of this rank for parameters of one spread.

    ``gather`` and ``reduce`` hold the same ranks (those over which values are sharded) apart from
    each other: the order of gathers and the order of reductions may then differ between ranks that
    skip different modules. ``replicas`` hold the same shard, ``members`` the same values, ``block``
    each a share of the whole. ``counted`` are ranks whose shards together are every element once.
    """

    gather: Group
    reduce: Group
    replicas: Group
    members: Group
    block: Group
    counted: tuple[int, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.gather, self.reduce, self.replicas, self.members, self.block
