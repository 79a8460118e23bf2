"""All ranks of one engine, and the groups it cuts them into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zeroexp.comm.group import Group, SoloGroup
from zeroexp.comm.native import NativeGroup
from zeroexp.comm.p2p import P2PGroup
from zeroexp.errors import RankMismatch
from zeroexp.ledger import Ledger


@dataclass
class World:
    """The groups of one engine.

    ``gather`` and ``reduce`` hold the same ranks (those a replica is sharded over) on channels of their own: the order
    of gathers and the order of reductions may then differ between ranks that skip different modules. ``replicas`` are
    the ranks that hold the same shard (one rank, unless ``zero.shard_size`` is smaller than the data-parallel size).
    ``control`` holds every rank.
    """

    rank: int
    size: int
    gather: Group
    reduce: Group
    replicas: Group
    control: Group

    @classmethod
    def create(cls, ledger: Ledger, *, shard_size: int | None, timeout: float) -> World:
        """Make the groups over the default process group; every rank must call this at the same point.

        Without a process group the world is this process. Raises :class:`RankMismatch` when a launcher announces
        more ranks than there are, or when ``shard_size`` does not divide the ranks.
        """
        if not dist.is_initialized():
            announced = int(os.environ.get("WORLD_SIZE", "1"))
            if announced > 1:
                raise RankMismatch(
                    f"the launcher announces {announced} ranks but torch.distributed is not initialised: each rank would "
                    "train alone. Call torch.distributed.init_process_group() before zeroexp."
                )
            solo = SoloGroup(0, ledger)
            return cls(0, 1, solo, solo, solo, solo)
        rank, size = dist.get_rank(), dist.get_world_size()
        shard = shard_size or size
        if size % shard:
            raise RankMismatch(f"zero.shard_size={shard} does not divide the {size} data-parallel ranks")
        shards = [tuple(range(k * shard, (k + 1) * shard)) for k in range(size // shard)]
        replicas = [tuple(range(k, size, shard)) for k in range(shard)]
        everyone = [tuple(range(size))]

        def mine(partition: Sequence[tuple[int, ...]]) -> Group:
            return _group_of(partition, rank, ledger, timeout)

        return cls(rank, size, mine(shards), mine(shards), mine(replicas), mine(everyone))

    def close(self) -> None:
        """Destroy the groups that :meth:`create` made."""
        for group in (self.gather, self.reduce, self.replicas, self.control):
            group.close()


def _group_of(
    partition: Sequence[tuple[int, ...]], rank: int, ledger: Ledger, timeout: float
) -> Group:
    """This rank's group of a partition of the world. Every rank creates every group, as torch demands."""
    own: Group = SoloGroup(rank, ledger)
    for ranks in partition:
        if len(ranks) == 1:
            continue
        channel = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
        if rank in ranks:
            kind = P2PGroup if dist.get_backend(channel) == "gloo" else NativeGroup
            own = kind(channel, ranks, rank, ledger, timeout)
    return own
