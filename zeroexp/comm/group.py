"""A group of ranks and what it can do together.

Two implementations share this interface: :class:`zeroexp.comm.p2p.P2PGroup` composes the
collectives from tagged sends and receives (gloo), :class:`zeroexp.comm.native.NativeGroup` calls
the backend's own (NCCL). Both add contributions of ranks in rank order or leave it to the backend,
count what is sent, and raise :class:`CollectiveTimeout` with the name of the operation instead of
hanging.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.errors import CollectiveTimeout
from zeroexp.ledger import Ledger


class Pending:
    """A collective in flight. :meth:`wait` ends it, once; what follows (a local sum) runs in the
    waiting thread."""

    def __init__(
        self,
        works: Sequence[tuple[int, dist.Work]],
        what: str,
        timeout: float,
        finish: Callable[[], None] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        self._works = list(works)
        self._what = what
        self._timeout = timeout
        self._finish = finish
        self._keep = keep  # operands must outlive the transfer

    @property
    def over(self) -> bool:
        """Whether :meth:`wait` would not block."""
        return all(work.is_completed() for _, work in self._works)

    def wait(self) -> None:
        """Block until done. Raises :class:`CollectiveTimeout` naming the ranks that did not take
        part."""
        deadline = time.monotonic() + self._timeout
        for peer, work in self._works:
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                raise self._failure(peer, error) from error
        self._works = []
        finish, self._finish, self._keep = self._finish, None, ()
        if finish is not None:
            finish()

    def _failure(self, peer: int, error: RuntimeError) -> CollectiveTimeout:
        if "imed out" in str(error) or "imeout" in str(error):
            late = sorted({p for p, w in self._works if p >= 0 and not w.is_completed()} | {peer})
            names = ", ".join(f"rank {p}" for p in late if p >= 0) or "an unknown rank"
            return CollectiveTimeout(
                f"{self._what}: no answer from {names} within {self._timeout:g} s. Every rank "
                "must use the same "
                f"modules the same number of times; {names} is elsewhere (uneven batches, a call "
                "on one rank only) or dead."
            )
        origin = f"rank {peer}" if peer >= 0 else "a peer"
        return CollectiveTimeout(
            f"{self._what}: the connection to {origin} broke ({str(error).splitlines()[0]}); look "
            "for the first error "
            f"of {origin}."
        )


DONE = Pending((), "nothing", 0.0)
"""What a group of one rank returns: there is nothing to wait for."""


def post(
    kind: Callable[..., dist.Work | None],
    tensor: Tensor,
    peer: int,
    channel: dist.ProcessGroup | None,
    tag: int,
) -> dist.Work:
    """Start a send or a receive (``kind``: ``dist.isend`` or ``dist.irecv``). Raises
    :class:`CollectiveTimeout` where the peer is gone already."""
    try:
        work = kind(tensor, peer, group=channel, tag=tag)
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"the connection to rank {peer} broke ({str(error).splitlines()[0]}); look for the "
            f"first error of rank {peer}."
        ) from error
    if work is None:  # torch returns None to ranks outside the group
        raise RuntimeError("this rank is not in the group it sends to")
    return work


def close_channel(channel: dist.ProcessGroup) -> None:
    """Destroy a process group; a second time, or after torch destroyed all, does nothing."""
    if dist.is_initialized():
        with suppress(ValueError):  # what torch raises for a group it no longer knows
            dist.destroy_process_group(channel)


def row_bytes(rows: Tensor) -> int:
    """Bytes of one row of ``rows`` ``[n, ...]``, also where n is 0."""
    return math.prod(rows.shape[1:]) * rows.element_size()


class Group(ABC):
    """Ranks that hold shards of the same state, or replicas of the same shard.

    ``ranks`` are global ranks in ascending order; ``index`` is this rank's place among them.
    """

    def __init__(self, ranks: Sequence[int], rank: int, ledger: Ledger, timeout: float) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self.ledger = ledger
        self.timeout = timeout

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # A connection, not a value: copies of a module that holds it share it.
        return self

    @property
    def peers(self) -> list[tuple[int, int]]:
        """``(index, global rank)`` of the others, starting with the next one so that no rank is
        everybody's first."""
        order = [(self.index + k) % self.size for k in range(1, self.size)]
        return [(i, self.ranks[i]) for i in order]

    @abstractmethod
    def all_gather(
        self, out: Tensor, shard: Tensor, *, tag: int, what: str, stays: bool = False
    ) -> Pending:
        """Collect the shard ``[n]`` of every rank into ``out`` ``[size * n]``; ``shard`` may be a
        slice of ``out``.

        ``stays`` promises that ``shard`` does not change before :meth:`settle`: the result is then
        there when ``out`` is full, whether or not the peers have come for their part.
        """

    def offer(self, shard: Tensor, *, tag: int) -> None:  # noqa: B027 (most groups need not)
        """Send this rank's part of the next :meth:`all_gather` with ``tag`` (and ``stays``) ahead
        of it, where the backend can.

        For a rank that is about to wait for a peer who may be waiting for this gather.
        """

    def settle(self, tag: int | None = None) -> None:  # noqa: B027
        """Wait until the peers have what was sent of shards that stay (of the one of ``tag``)."""

    @abstractmethod
    def reduce_scatter(
        self,
        out: Tensor,
        parts: Sequence[Tensor],
        *,
        tag: int,
        what: str,
        add: bool,
        wire: torch.dtype,
    ) -> Pending:
        """Sum ``parts[index]`` over ranks and leave it in ``out`` ``[n]``; ``parts`` are ``size``
        tensors ``[n]``.

        Values travel as ``wire`` and are added in rank order in the dtype of ``out``. With ``add``
        the sum is added to what ``out`` holds. ``parts`` must not change before the result has been
        waited for.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, tag: int, what: str) -> Pending:
        """Sum ``tensor`` over ranks, in place, with the same bits on every rank."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int, tag: int, what: str) -> Pending:
        """Copy ``tensor`` from index ``source`` to the others, in place."""

    @abstractmethod
    def all_to_all(
        self,
        out: Tensor,
        rows: Tensor,
        *,
        received: Sequence[int],
        sent: Sequence[int],
        tag: int,
        what: str,
    ) -> Pending:
        """Send the next ``sent[i]`` of ``rows`` ``[sum(sent), ...]`` to index ``i`` and fill
        ``out`` ``[sum(received), ...]`` with what arrives, by index.

        Both are contiguous; counts may be 0 and differ between ranks, but ``received[i]`` here is
        ``sent[index]`` there. ``rows`` must not change before the result has been waited for.
        """

    @abstractmethod
    def exchange(self, payload: Tensor, what: str) -> Tensor:
        """Every rank's small ``payload`` ``[n]`` as ``[size, n]`` on every rank; counted as control
        traffic."""

    @abstractmethod
    def close(self) -> None:
        """Give the group back; the ranks need not do it together."""


class SoloGroup(Group):
    """A group of one rank: everything is already where it belongs."""

    def __init__(self, rank: int, ledger: Ledger) -> None:
        super().__init__([rank], rank, ledger, 0.0)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, tag: int, what: str, stays: bool = False
    ) -> Pending:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE

    def reduce_scatter(
        self,
        out: Tensor,
        parts: Sequence[Tensor],
        *,
        tag: int,
        what: str,
        add: bool,
        wire: torch.dtype,
    ) -> Pending:
        value = parts[0].to(wire)
        if add:
            out.add_(value)
        elif out.data_ptr() != value.data_ptr():
            out.copy_(value)
        return DONE

    def all_reduce(self, tensor: Tensor, *, tag: int, what: str) -> Pending:
        return DONE

    def broadcast(self, tensor: Tensor, *, source: int, tag: int, what: str) -> Pending:
        return DONE

    def all_to_all(
        self,
        out: Tensor,
        rows: Tensor,
        *,
        received: Sequence[int],
        sent: Sequence[int],
        tag: int,
        what: str,
    ) -> Pending:
        out.copy_(rows)
        return DONE

    def exchange(self, payload: Tensor, what: str) -> Tensor:
        return payload.unsqueeze(0)

    def close(self) -> None:
        pass
