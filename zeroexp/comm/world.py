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

_BETWEEN = 5
"""Space of tags of groups within a pipe, behind those of the five that each engine has."""


@dataclass
class World:
    """The groups of one engine.

    ``size`` data-parallel ranks, this one among them, train the same part of the model: all of it,
    unless it is spread over a pipe of ``parts`` ranks. Rank r of N holds part ``r // (N / parts)``,
    so that neighbours reduce with each other.

    ``gather`` and ``reduce`` hold the same ranks (those a replica is sharded over) on channels of
    their own: the order of gathers and the order of reductions may then differ between ranks that
    skip different modules. ``replicas`` are the ranks that hold the same shard (one rank, unless
    ``zero.shard_size`` is smaller than the data-parallel size). ``control`` holds every
    data-parallel rank, ``pipe`` the ranks that hold the other parts of the same replica.
    """

    rank: int
    size: int
    ledger: Ledger
    shard_size: int | None
    timeout: float
    parts: int = 1
    gather: Group = field(init=False)
    reduce: Group = field(init=False)
    replicas: Group = field(init=False)
    control: Group = field(init=False)
    pipe: Group = field(init=False)
    channel: dist.ProcessGroup | None = field(default=None, init=False)
    """What the groups are made of where one channel serves them all (gloo)."""
    closed: bool = field(default=True, init=False)

    @classmethod
    def create(
        cls, ledger: Ledger, *, shard_size: int | None, timeout: float, parts: int = 1
    ) -> World:
        """Make the groups over the default process group; every rank must call this at the same
        point.

        Without a process group the world is this process. Raises :class:`RankMismatch` when a
        launcher announces more ranks than there are, when ``parts`` does not divide the ranks, or
        ``shard_size`` the data-parallel ones.
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
        if size % parts:
            raise RankMismatch(f"a pipe of {parts} ranks does not divide the {size} ranks")
        size //= parts
        if shard_size and size % shard_size:
            raise RankMismatch(
                f"zero.shard_size={shard_size} does not divide the {size} data-parallel ranks"
            )
        world = cls(rank, size, ledger, shard_size, timeout, parts)
        world.open()
        return world

    @property
    def first(self) -> bool:
        """Whether this is the first of the ranks that hold the same part of the model."""
        return self.control.index == 0

    def open(self) -> None:
        """Make the groups, if they are not there (collective)."""
        if not self.closed:
            return
        size, total = self.size, self.size * self.parts
        if total > 1 and not dist.is_initialized():
            raise RankMismatch(
                f"the process group of the {total} ranks that hold this state was destroyed; save "
                "or use it before torch.distributed.destroy_process_group()"
            )
        shard = self.shard_size or size
        alike = [range(first, first + size) for first in range(0, total, size)]
        shards = [tuple(part[k : k + shard]) for part in alike for k in range(0, size, shard)]
        replicas = [tuple(part[k::shard]) for part in alike for k in range(shard)]
        pipes = [tuple(range(k, total, size)) for k in range(size)]

        partitions = [shards, shards, replicas, [tuple(part) for part in alike], pipes]
        if total > 1 and dist.get_backend() == "gloo":
            # Tags keep the groups apart, so one channel serves them all.
            channel = self.channel = dist.new_group(timeout=timedelta(seconds=self.timeout))
            groups = [
                self._on_channel(partition, channel, space)
                for space, partition in enumerate(partitions)
            ]
        else:
            groups = [self._with_channels(partition) for partition in partitions]
        self.gather, self.reduce, self.replicas, self.control, self.pipe = groups
        self.closed = False

    def between(self, places: Sequence[int]) -> Group:
        """A group of the pipe's ranks ``places`` (this one among them, ascending)."""
        ranks = [self.pipe.ranks[place] for place in places]
        if len(ranks) == 1:
            return SoloGroup(self.rank, self.ledger)
        if self.channel is not None:
            return P2PGroup(
                self.channel, ranks, self.rank, self.ledger, self.timeout, space=_BETWEEN
            )
        limit = timedelta(seconds=self.timeout)
        own = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
        return NativeGroup(own, ranks, self.rank, self.ledger, self.timeout)

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
            for group in (self.gather, self.reduce, self.replicas, self.control, self.pipe):
                group.close()
            self.channel = None
        self.closed = True
