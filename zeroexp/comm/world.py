"""All ranks of one engine, and the groups it cuts them into."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from zeroexp.comm.group import Group, SoloGroup
from zeroexp.comm.native import NativeGroup
from zeroexp.comm.p2p import P2PGroup
from zeroexp.comm.sharing import Partition, Sharing, group_of, shared_ranks
from zeroexp.errors import RankMismatch
from zeroexp.ledger import Ledger


@dataclass
class World:
    """The groups of one engine. ``control`` holds every rank."""

    rank: int
    size: int
    ledger: Ledger
    shard_size: int | None
    timeout: float
    control: Group = field(init=False)
    closed: bool = field(default=True, init=False)
    _sharings: dict[int, Sharing] = field(default_factory=dict, init=False)
    _channel: dist.ProcessGroup | None = field(default=None, init=False)
    _num_spaces: int = field(default=0, init=False)

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
        if size > 1 and dist.get_backend() == "gloo":
            # Tags keep the groups apart, so one channel serves them all.
            self._channel = dist.new_group(timeout=timedelta(seconds=self.timeout))
        self.control = self._group((tuple(range(size)),))
        known, self._sharings = list(self._sharings), {}
        self.closed = False
        for spread in known or [1]:
            self.sharing(spread)

    def sharing(self, spread: int = 1) -> Sharing:
        """The groups for parameters that are spread over blocks of ``spread`` data-parallel ranks;
        1: that every rank has. All ranks must ask for them the first time at the same point.

        Raises :class:`RankMismatch` when ``spread`` does not fit the ranks.
        """
        if spread not in self._sharings:
            ranks = range(self.size)
            cut = shared_ranks(ranks, self.shard_size or self.size, spread)
            copy = max(self.shard_size or self.size, spread)
            first = ranks.index(self.rank) // copy * copy
            self._sharings[spread] = Sharing(
                gather=self._group(cut.shards),
                reduce=self._group(cut.shards),
                replicas=self._group(cut.replicas),
                members=self.control if spread == 1 else self._group(cut.members),
                parts=self._group(cut.parts),
                counted=tuple(ranks[first : first + copy]),
            )
        return self._sharings[spread]

    def settle(self) -> None:
        """Wait until all peers have what was sent of shards that stay."""
        for sharing in self._sharings.values():
            sharing.gather.settle()

    def _group(self, partition: Partition) -> Group:
        """This rank's group of a partition of the world."""
        if self._channel is None:
            return self._with_channels(partition)
        own = group_of(partition, self.rank)
        if len(own) == 1:  # all groups of a partition have one size, so no rank counts differently
            return SoloGroup(self.rank, self.ledger)
        self._num_spaces += 1
        return P2PGroup(
            self._channel,
            own,
            self.rank,
            self.ledger,
            self.timeout,
            space=self._num_spaces - 1,
        )

    def _with_channels(self, partition: Partition) -> Group:
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
            self.control.close()
            for sharing in self._sharings.values():
                for group in sharing.groups:
                    group.close()
        self.closed = True
        self._channel, self._num_spaces = None, 0
