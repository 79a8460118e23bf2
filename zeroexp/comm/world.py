"""All ranks of one engine, and the groups it cuts them into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
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

    ``gather`` and ``reduce`` hold the same ranks (those a replica is sharded over) on channels of
    their own: the order of gathers and the order of reductions may then differ between ranks that
    skip different modules. ``replicas`` are the ranks that hold the same shard (one rank, unless
    ``zero.shard_size`` is smaller than the data-parallel size). ``control`` holds every rank.
    """

    rank: int
    size: int
    ledger: Ledger
    shard_size: int | None
    timeout: float
    gather: Group = field(init=False)
    reduce: Group = field(init=False)
    replicas: Group = field(init=False)
    control: Group = field(init=False)
    closed: bool = field(default=True, init=False)

    @classmethod
    def create(cls, ledger: Ledger, *, shard_size: int | None, timeout: float) -> World:
        """Make the groups over the default process group; every rank must call this at the same
        point.

        Without a process group the world is this process. Raises :class:`RankMismatch` when a
        launcher announces more ranks than there are, or when ``shard_size`` does not divide the
        ranks.
        """
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RankMismatch(
                f"the launcher announces {os.environ['WORLD_SIZE']} ranks but torch.distributed "
                "is not initialised: each "
                "rank would train alone. Call torch.distributed.init_process_group() before "
                "zeroexp."
            )
        if shard_size and size % shard_size:
            raise RankMismatch(
                f"zero.shard_size={shard_size} does not divide the {size} data-parallel ranks"
            )
        world = cls(rank, size, ledger, shard_size, timeout)
        world.open()
        return world

    def open(self) -> None:
        """Make the groups, if they are not there (collective)."""
        if not self.closed:
            return
        size = self.size
        if size > 1 and not dist.is_initialized():
            raise RankMismatch(
                f"the process group of the {size} ranks that hold this state was destroyed; save "
                "or use it before torch.distributed.destroy_process_group()"
            )
        shard = self.shard_size or size
        shards = [tuple(range(k * shard, (k + 1) * shard)) for k in range(size // shard)]
        replicas = [tuple(range(k, size, shard)) for k in range(shard)]

        partitions = [shards, shards, replicas, [tuple(range(size))]]
        if size > 1 and dist.get_backend() == "gloo":
            # Tags keep the groups apart, so one channel serves them all.
            channel = dist.new_group(timeout=timedelta(seconds=self.timeout))
            groups = [
                self._on_channel(partition, channel, space)
                for space, partition in enumerate(partitions)
            ]
        else:
            groups = [self._with_channels(partition) for partition in partitions]
        self.gather, self.reduce, self.replicas, self.control = groups
        self.closed = False

    def _on_channel(
        self, partition: Sequence[tuple[int, ...]], channel: dist.ProcessGroup, space: int
    ) -> Group:
        """This rank's group of a partition of the world."""
        ranks = next(r for r in partition if self.rank in r)
        if len(ranks) == 1:
            return SoloGroup(self.rank, self.ledger)
        return P2PGroup(channel, ranks, self.rank, self.ledger, self.timeout, space=space)

    def _with_channels(self, partition: Sequence[tuple[int, ...]]) -> Group:
        """The same with a communicator for each group; every rank makes every one, as torch
        demands."""
        own: Group = SoloGroup(self.rank, self.ledger)
        for ranks in partition:
            if len(ranks) == 1:
                continue
            channel = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
            if self.rank in ranks:
                own = NativeGroup(channel, ranks, self.rank, self.ledger, self.timeout)
        return own

    def close(self) -> None:
        """Destroy the groups; :meth:`open` makes new ones."""
        if not self.closed:
            for group in (self.gather, self.reduce, self.replicas, self.control):
                group.close()
        self.closed = True
