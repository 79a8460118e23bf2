"""Collectives of the backend itself, for NCCL and other accelerators' libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm.group import Group, Pending, close_channel, row_bytes
from zeroexp.ledger import Ledger

# torch 2.13 renamed the flat collectives and warns about the old names; this is the one place that
# picks.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeGroup(Group):
    """See :class:`Group`. The order of additions is the backend's; ``tag`` is not needed, streams
    keep the order."""

    def __init__(
        self,
        channel: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        ledger: Ledger,
        timeout: float,
    ) -> None:
        super().__init__(ranks, rank, ledger, timeout)
        self._channel = channel

    def _pending(self, work: dist.Work, what: str, keep: Sequence[Tensor]) -> Pending:
        return Pending([(-1, work)], what, self.timeout, keep=keep)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, tag: int, what: str, stays: bool = False
    ) -> Pending:
        work = _all_gather(out, shard, group=self._channel, async_op=True)
        self.ledger.sent("all_gather", (self.size - 1) * shard.nbytes)
        return self._pending(work, what, (out, shard))

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
        mine = torch.cat([part.to(wire) for part in parts])
        summed = torch.empty(out.numel(), dtype=wire, device=out.device)
        work = _reduce_scatter(summed, mine, group=self._channel, async_op=True)
        self.ledger.sent("reduce_scatter", (self.size - 1) * summed.nbytes)

        def finish() -> None:
            if add:
                out.add_(summed)
            else:
                out.copy_(summed)

        return Pending([(-1, work)], what, self.timeout, finish, keep=(mine, summed))

    def all_reduce(self, tensor: Tensor, *, tag: int, what: str) -> Pending:
        work = dist.all_reduce(tensor, group=self._channel, async_op=True)
        self.ledger.sent("all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        return self._pending(work, what, (tensor,))

    def broadcast(self, tensor: Tensor, *, source: int, tag: int, what: str) -> Pending:
        work = dist.broadcast(tensor, self.ranks[source], group=self._channel, async_op=True)
        if self.index == source:
            self.ledger.sent("broadcast", tensor.nbytes)
        return self._pending(work, what, (tensor,))

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
        work = dist.all_to_all_single(
            out, rows, list(received), list(sent), group=self._channel, async_op=True
        )
        self.ledger.sent("all_to_all", (sum(sent) - sent[self.index]) * row_bytes(rows))
        return self._pending(work, what, (out, rows))

    def exchange(self, payload: Tensor, what: str) -> Tensor:
        device = torch.device("cuda", torch.cuda.current_device())
        rows = torch.empty(self.size * payload.numel(), dtype=payload.dtype, device=device)
        work = _all_gather(rows, payload.to(device), group=self._channel, async_op=True)
        self.ledger.sent_control((self.size - 1) * payload.nbytes)
        self._pending(work, what, (rows,)).wait()
        return rows.view(self.size, -1).to(payload.device)

    def close(self) -> None:
        close_channel(self._channel)
