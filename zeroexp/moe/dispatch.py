"""Tokens to their experts and back: a local permutation and, between ranks, two all-to-alls.

What is sent is a list of rows, sorted by expert: as long as there are assignments, however many
experts there are, and never padded to a capacity. The experts lie in rank order, so the rows of one
rank are one block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroexp.comm import Group
from zeroexp.comm.all_to_all import AllToAll
from zeroexp.moe.permutation import Permutation
from zeroexp.moe.routing import Routing
from zeroexp.moe.weighted_sum import weighted_sum

TAGS = 4
"""Tags that one layer uses: there and back, each with its backward."""


class LocalDispatch:
    """All experts are on this rank. ``rows`` ``[A, C]`` are sorted by expert."""

    def __init__(self, x_SC: Tensor, routing: Routing) -> None:
        self._routing = routing
        self._rows_AC = x_SC.index_select(0, routing.token_A)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """The rows of this rank's experts, sorted by expert, and how many each has."""
        return self._rows_AC, self._routing.counts_E

    def combine(self, rows_AC: Tensor) -> Tensor:
        """Weighted sums of the experts' outputs, one row a token; zeros where all turned it
        away."""
        routing = self._routing
        return weighted_sum(rows_AC, routing.weight_A, routing.token_A, routing.num_tokens)


class RemoteDispatch:
    """The same over an expert-parallel group; made by every rank of it at the same point.

    The rows leave at once: what is computed before :meth:`arrived` runs beside the transfer.
    """

    def __init__(
        self,
        x_SC: Tensor,
        routing: Routing,
        group: Group,
        *,
        tag: int,
        where: str,
        done: Callable[[int, float], None],
    ) -> None:
        self._local = LocalDispatch(x_SC, routing)
        rows_AC, counts_E = self._local.arrived()
        # Who sends how many rows to which expert: [rank, expert]. The host must know, to size the
        # buffers; the one wait for the device in a forward pass.
        table = group.exchange(counts_E, f"{where}: tokens per expert")
        table_RRE = table.view(group.size, group.size, -1).cpu()
        mine_RE = table_RRE[:, group.index]
        sent = table_RRE[group.index].sum(1).tolist()
        received = mine_RE.sum(1).tolist()
        self._there = AllToAll(
            group,
            received=received,
            sent=sent,
            tag=tag * TAGS,
            what=f"{where}: all-to-all of tokens",
            done=done,
        )
        self._back = AllToAll(
            group,
            received=sent,
            sent=received,
            tag=tag * TAGS + 2,
            what=f"{where}: all-to-all of results",
            done=done,
        )
        self._counts_E = mine_RE.sum(0).to(x_SC.device)
        self._by_expert = _by_expert(mine_RE, x_SC.device)
        self._started = self._there.start(rows_AC)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """See :class:`LocalDispatch`; waits for the rows."""
        rows = self._there.end(self._started)
        if self._by_expert is not None:
            rows = self._by_expert.apply(rows)
        return rows, self._counts_E

    def combine(self, rows: Tensor) -> Tensor:
        """See :class:`LocalDispatch`; sends the results home first."""
        if self._by_expert is not None:
            rows = self._by_expert.undo(rows)
        return self._local.combine(self._back.end(self._back.start(rows)))


def _by_expert(counts_RE: Tensor, device: torch.device) -> Permutation | None:
    """From the order of arrival (by rank, then by expert) to one by expert, then by rank; None
    where they are the same."""
    ranks, experts = counts_RE.shape
    if experts == 1:
        return None
    expert_of_block = torch.arange(experts).repeat(ranks)
    expert_of_row = expert_of_block.repeat_interleave(counts_RE.reshape(-1))
    return Permutation(expert_of_row.argsort(stable=True).to(device))
