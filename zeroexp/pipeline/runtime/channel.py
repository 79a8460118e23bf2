"""A pipeline's ranks and how they reach each other: lanes between stages, and meetings of all.

Data-parallel groups of the stages are the caller's: this is one pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm import Group, Pending
from zeroexp.comm.group import DONE, SoloGroup, close_channel
from zeroexp.comm.notes import exchange_notes
from zeroexp.comm.p2p import P2PGroup
from zeroexp.comm.pool import BufferPool
from zeroexp.errors import RankMismatch
from zeroexp.ledger import Ledger
from zeroexp.pipeline.runtime.lane import Inbox, Outbox, Part, Way, Wire

_CONTROL, _TIES, _LANES = P2PGroup.SPACES - 3, P2PGroup.SPACES - 2, P2PGroup.SPACES - 1
"""Spaces of tags on the channel (see :class:`P2PGroup`)."""


class Channel:
    """``ranks[i]`` is the global rank of the pipe's rank i, ascending; ``rank`` is this process's.

    ``group`` is a gloo process group that holds them (None for a pipe of one rank); other pipes may
    use the same one. ``timeout`` in seconds is the deadline of each wait.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        timeout: float,
    ) -> None:
        if list(ranks) != sorted(set(ranks)) or rank not in ranks:
            raise RankMismatch(
                f"the ranks of a pipe are {list(ranks)} on rank {rank}: they must ascend and hold "
                "this rank"
            )
        self.ranks = tuple(ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.ledger = ledger
        self.timeout = timeout
        self._group = group
        self._pool = BufferPool(torch.device("cpu"), ledger, "sent between stages")
        self._control = self._group_of(self.ranks, _CONTROL)

    @classmethod
    def open(cls, ranks: Sequence[int], ledger: Ledger, timeout: float) -> Channel:
        """A channel over the default process group; every rank of the world calls this at the same
        point, each with its own pipe's ranks."""
        if not dist.is_initialized():
            return cls(ranks, 0, None, ledger, timeout)
        if dist.get_backend() != "gloo":
            raise RankMismatch(
                f"stages talk over gloo, the process group is {dist.get_backend()}: give Channel a "
                "gloo group of the same ranks (torch.distributed.new_group(backend='gloo'))"
            )
        group = dist.new_group(timeout=timedelta(seconds=timeout))
        return cls(ranks, dist.get_rank(), group, ledger, timeout)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _group_of(self, ranks: Sequence[int], space: int) -> Group:
        own = self.ranks[self.index]
        if len(ranks) == 1 or self._group is None:
            return SoloGroup(own, self.ledger)
        return P2PGroup(self._group, ranks, own, self.ledger, self.timeout, space=space)

    def _wire(self, boundary: int, way: Way, peer: int) -> Wire:
        if self._group is None:
            raise RankMismatch("stages on several ranks need a process group")

        def tag(part: Part) -> int:
            return ((boundary * len(Way) + way) * len(Part) + part) * P2PGroup.SPACES + _LANES

        return Wire(self._group, self.ranks[peer], tag, self.ledger, self.timeout)

    def outbox(self, boundary: int, way: Way, peer: int) -> Outbox:
        """What this rank sends over the boundary after stage ``boundary`` to the pipe's rank
        ``peer``."""
        return Outbox(self._wire(boundary, way, peer), self._pool)

    def inbox(self, boundary: int, way: Way, peer: int, device: torch.device) -> Inbox:
        """What it receives there, on ``device``."""
        return Inbox(self._wire(boundary, way, peer), device)

    def exchange(self, payload: Tensor, what: str) -> Tensor:
        """Every rank's ``payload`` ``[n]`` as ``[size, n]``; control traffic."""
        return self._control.exchange(payload, what)

    def exchange_notes(self, note: Any, what: str) -> list[Any]:
        """Every rank's ``note`` (anything JSON can hold), in rank order."""
        return exchange_notes(self._control, note, what)

    def sum_between(self, holders: Sequence[int], tensor: Tensor, tag: int, what: str) -> Pending:
        """Sum ``tensor`` over the pipe's ranks ``holders`` (this one among them), in place, with
        the same bits on each."""
        if len(holders) == 1:
            return DONE
        group = self._group_of([self.ranks[i] for i in holders], _TIES)
        return group.all_reduce(tensor, tag=tag, what=what)

    def copy_from_first(
        self, holders: Sequence[int], tensor: Tensor, tag: int, what: str
    ) -> Pending:
        """Copy ``tensor`` from the first of the ranks ``holders`` to the others, in place."""
        if len(holders) == 1:
            return DONE
        group = self._group_of([self.ranks[i] for i in holders], _TIES)
        return group.broadcast(tensor, source=0, tag=tag, what=what)

    def close(self) -> None:
        """Give the process group back; the ranks need not do it together."""
        if self._group is not None:
            close_channel(self._group)
