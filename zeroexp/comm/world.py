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
from zeroexp.comm.sharing import Partition, Sharing, group_of, shared_ranks
from zeroexp.errors import RankMismatch
from zeroexp.ledger import Ledger

_BETWEEN = P2PGroup.SPACES - 4
"""Space of tags of groups within a pipe, before those of the channel between its ranks."""


@dataclass
class World:
    """The groups of one engine.

    ``size`` data-parallel ranks, this one among them, train the same part of the model: all of it,
    unless it is spread over a pipe of ``parts`` ranks. Rank r of N holds part ``r // (N / parts)``,
    so that neighbours reduce with each other. ``control`` holds every data-parallel rank, ``pipe``
    the ranks that hold the other parts of the same replica.
    """

    rank: int
    size: int
    ledger: Ledger
    shard_size: int | None
    timeout: float
    parts: int = 1
    control: Group = field(init=False)
    pipe: Group = field(init=False)
    channel: dist.ProcessGroup | None = field(default=None, init=False)
    """What the groups are made of where one channel serves them all (gloo)."""
    closed: bool = field(default=True, init=False)
    _sharings: dict[int, Sharing] = field(default_factory=dict, init=False)
    _num_spaces: int = field(default=0, init=False)

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
        alike = [range(first, first + size) for first in range(0, total, size)]
        if total > 1 and dist.get_backend() == "gloo":
            # Tags keep the groups apart, so one channel serves them all.
            self.channel = dist.new_group(timeout=timedelta(seconds=self.timeout))
        self.control = self._group([tuple(part) for part in alike])
        self.pipe = self._group([tuple(range(k, total, size)) for k in range(size)])
        known, self._sharings = list(self._sharings), {}
        self.closed = False
        for spread in known or [1]:
            self.sharing(spread)

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

    def sharing(self, spread: int = 1) -> Sharing:
        """The groups for parameters that are spread over blocks of ``spread`` data-parallel ranks;
        1: that every rank has. All ranks must ask for them the first time at the same point.

        Raises :class:`RankMismatch` when ``spread`` does not fit the ranks.
        """
        if spread not in self._sharings:
            size = self.size
            alike = [range(first, first + size) for first in range(0, size * self.parts, size)]
            cuts = [shared_ranks(part, self.shard_size or size, spread) for part in alike]
            shards = [ranks for cut in cuts for ranks in cut.shards]
            copy = max(self.shard_size or size, spread)
            first = self.control.index // copy * copy
            self._sharings[spread] = Sharing(
                gather=self._group(shards),
                reduce=self._group(shards),
                replicas=self._group([ranks for cut in cuts for ranks in cut.replicas]),
                members=self.control
                if spread == 1
                else self._group([ranks for cut in cuts for ranks in cut.members]),
                block=self._group([ranks for cut in cuts for ranks in cut.blocks]),
                counted=self.control.ranks[first : first + copy],
            )
        return self._sharings[spread]

    def settle(self) -> None:
        """Wait until all peers have what was sent of shards that stay."""
        for sharing in self._sharings.values():
            sharing.gather.settle()

    def _group(self, partition: Partition) -> Group:
        """This rank's group of a partition of the world."""
        if self.channel is None:
            return self._with_channels(partition)
        own = group_of(partition, self.rank)
        if len(own) == 1:  # all groups of a partition have one size, so no rank counts differently
            return SoloGroup(self.rank, self.ledger)
        self._num_spaces += 1
        return P2PGroup(
            self.channel,
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
            self.pipe.close()
            for sharing in self._sharings.values():
                for group in sharing.groups:
                    group.close()
        self.closed = True
        self.channel, self._num_spaces = None, 0
