"""Collectives composed from tagged sends and receives, for gloo.

gloo's own reduce-scatter is an all-reduce in disguise: it sends twice what is needed at 2 ranks,
and its order of additions depends on where a buffer is cut. Direct exchange sends ``(N-1)/N`` of
the buffer, and adding what arrives in rank order makes the result independent of the cut. The tag
names what travels, so two ranks that disagree about it meet a deadline instead of each other's
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm.group import Group, Pending, close_channel, post, row_bytes
from zeroexp.comm.pool import BufferPool
from zeroexp.ledger import Ledger


class Op(IntEnum):
    """What a message belongs to; part of its tag."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    EXCHANGE = 4
    ALL_TO_ALL = 5


class P2PGroup(Group):
    """See :class:`Group`. ``channel`` is a process group that holds ``ranks``.

    Several groups may use one channel, each in its own ``space`` of tags: gloo wakes a thread of
    every process group a hundred times a second, so they are few.
    """

    SPACES = 64
    """A world takes two, and five for each number of ranks that experts are spread over; the last
    are those of pipes."""

    def __init__(
        self,
        channel: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        ledger: Ledger,
        timeout: float,
        *,
        space: int = 0,
    ) -> None:
        super().__init__(ranks, rank, ledger, timeout)
        self._channel = channel
        self._space = space
        self._offered: set[int] = set()  # tags of gathers whose part of this rank is sent
        self._sent: dict[int, list[tuple[int, dist.Work]]] = {}  # by tag, waited for by nobody yet
        self._pool = BufferPool(torch.device("cpu"), ledger, f"received in space {space}")

    def _tag(self, tag: int, op: Op) -> int:
        return (tag * len(Op) + op) * self.SPACES + self._space

    def _send(self, tensor: Tensor, peer: int, tag: int, op: Op) -> tuple[int, dist.Work]:
        tag = self._tag(tag, op)
        return peer, post(dist.isend, tensor, peer, self._channel, tag)

    def _recv(self, tensor: Tensor, peer: int, tag: int, op: Op) -> tuple[int, dist.Work]:
        tag = self._tag(tag, op)
        return peer, post(dist.irecv, tensor, peer, self._channel, tag)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, tag: int, what: str, stays: bool = False
    ) -> Pending:
        n = shard.numel()
        if n == 0:
            return Pending((), what, self.timeout)
        slices = _slices(out, n, self.size)
        works = [self._recv(slices[i], peer, tag, Op.ALL_GATHER) for i, peer in self.peers]
        if not stays:
            works += self._send_shard(shard, tag)
        elif tag in self._offered:
            self._offered.remove(tag)
        else:
            self._sent.setdefault(tag, []).extend(self._send_shard(shard, tag))
        own = slices[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return Pending(works, what, self.timeout, keep=(out, shard))

    def _send_shard(self, shard: Tensor, tag: int) -> list[tuple[int, dist.Work]]:
        self.ledger.sent("all_gather", (self.size - 1) * shard.nbytes)
        return [self._send(shard, peer, tag, Op.ALL_GATHER) for _, peer in self.peers]

    def offer(self, shard: Tensor, *, tag: int) -> None:
        if shard.numel() and tag not in self._offered:
            self._offered.add(tag)
            self._sent.setdefault(tag, []).extend(self._send_shard(shard, tag))

    def settle(self, tag: int | None = None) -> None:
        tags = list(self._sent) if tag is None else [tag]
        sent = [each for t in tags for each in self._sent.pop(t, ())]
        Pending(sent, "sending of shards", self.timeout).wait()

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
        n = out.numel()
        if n == 0:
            return Pending((), what, self.timeout)
        mine = [part.to(wire) for part in parts]
        raw = self._pool.take((self.size - 1) * n, wire)
        inbox = _slices(raw.view(wire), n, self.size - 1)
        summands = {i: buffer for (i, _), buffer in zip(self.peers, inbox, strict=True)}
        works = [self._recv(summands[i], peer, tag, Op.REDUCE_SCATTER) for i, peer in self.peers]
        works += [self._send(mine[i], peer, tag, Op.REDUCE_SCATTER) for i, peer in self.peers]
        self.ledger.sent("reduce_scatter", (self.size - 1) * mine[0].nbytes)
        summands[self.index] = mine[self.index]

        def finish() -> None:
            _sum_in_order(out, [summands[i] for i in range(self.size)], add)
            self._pool.give(raw)

        return Pending(works, what, self.timeout, finish, keep=(*mine, *inbox))

    def all_reduce(self, tensor: Tensor, *, tag: int, what: str) -> Pending:
        inbox = [torch.empty_like(tensor) for _ in self.peers]
        parts = {i: buffer for (i, _), buffer in zip(self.peers, inbox, strict=True)}
        works = [self._recv(parts[i], peer, tag, Op.ALL_REDUCE) for i, peer in self.peers]
        mine = tensor.clone()
        works += [self._send(mine, peer, tag, Op.ALL_REDUCE) for _, peer in self.peers]
        self.ledger.sent("all_reduce", (self.size - 1) * tensor.nbytes)
        parts[self.index] = mine

        def finish() -> None:
            _sum_in_order(tensor, [parts[i] for i in range(self.size)], add=False)

        return Pending(works, what, self.timeout, finish, keep=(mine, *inbox))

    def broadcast(self, tensor: Tensor, *, source: int, tag: int, what: str) -> Pending:
        if self.index == source:
            works = [self._send(tensor, peer, tag, Op.BROADCAST) for _, peer in self.peers]
            self.ledger.sent("broadcast", (self.size - 1) * tensor.nbytes)
        else:
            works = [self._recv(tensor, self.ranks[source], tag, Op.BROADCAST)]
        return Pending(works, what, self.timeout, keep=(tensor,))

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
        inbox, outbox = out.split(list(received)), rows.split(list(sent))
        # An empty part needs no message: both ends know the counts.
        works = [
            self._recv(inbox[i], peer, tag, Op.ALL_TO_ALL) for i, peer in self.peers if received[i]
        ]
        works += [
            self._send(outbox[i], peer, tag, Op.ALL_TO_ALL) for i, peer in self.peers if sent[i]
        ]
        inbox[self.index].copy_(outbox[self.index])
        self.ledger.sent("all_to_all", (sum(sent) - sent[self.index]) * row_bytes(rows))
        return Pending(works, what, self.timeout, keep=(out, rows))

    def exchange(self, payload: Tensor, what: str) -> Tensor:
        rows = payload.new_empty(self.size, payload.numel())
        rows[self.index] = payload
        works = [self._recv(rows[i], peer, 0, Op.EXCHANGE) for i, peer in self.peers]
        works += [self._send(payload, peer, 0, Op.EXCHANGE) for _, peer in self.peers]
        self.ledger.sent_control((self.size - 1) * payload.nbytes)
        Pending(works, what, self.timeout).wait()
        return rows

    def close(self) -> None:
        close_channel(self._channel)


def _slices(flat: Tensor, n: int, count: int) -> list[Tensor]:
    """The first ``count`` slices of ``n`` elements; ``Tensor.split`` takes twice as long."""
    return [flat[i * n : (i + 1) * n] for i in range(count)]


def _sum_in_order(out: Tensor, parts: list[Tensor], add: bool) -> None:
    """``out (+)= ((parts[0] + parts[1]) + parts[2]) + ...`` in the dtype of ``out``; ``out`` may
    alias one part."""
    same = all(p.dtype == out.dtype for p in parts)
    if len(parts) == 2 and same and not add:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(out.dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    if add:
        out.add_(total)
    else:
        out.copy_(total)
