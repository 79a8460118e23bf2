"""What a layer did since it was last asked: loads, drops, losses, bytes, seconds.

A forward pass adds to sums that stay on the device; only reading waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroexp.moe.routing import Routing

LOSSES = ("balance", "z", "sequence")


@dataclass(frozen=True)
class Numbers:
    """Sums or means since the last reset, over the ranks that were asked together."""

    tokens_per_expert: tuple[int, ...]
    """Assignments that were wanted, dropped ones included."""
    drop_rate: float
    """Share of the assignments for which no place was left."""
    max_vio: float
    """(most loaded - mean) / mean (arXiv:2408.15664); 0 is even."""
    losses: Mapping[str, float]
    """Means over forward passes, before they are weighted; only those that are computed."""
    all_to_all_bytes: int
    """Sent to other ranks, forward and backward, summed over ranks."""
    all_to_all_seconds: float
    """For which a host waited, the mean over ranks. On an accelerator it waits less than it
    takes."""


class Statistics:
    """The sums of one layer on this rank."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.reset()

    def reset(self) -> None:
        self._counts: Tensor | None = None  # wanted and kept, [2 * E] int64
        self._losses: dict[str, Tensor] = {}
        self._forwards = 0
        self._nbytes = 0
        self._seconds = 0.0

    def record(self, routing: Routing, losses: Mapping[str, Tensor]) -> None:
        """Add one forward pass."""
        counts = torch.cat((routing.load_E, routing.counts_E))
        self._counts = counts if self._counts is None else self._counts + counts
        for name, loss in losses.items():
            value = loss.detach()
            self._losses[name] = self._losses[name] + value if name in self._losses else value
        self._forwards += 1

    def transferred(self, nbytes: int, seconds: float) -> None:
        """Add one all-to-all."""
        self._nbytes += nbytes
        self._seconds += seconds

    @property
    def width(self) -> int:
        """Numbers in :meth:`sums`."""
        return 2 * self.num_experts + 2 * len(LOSSES) + 3

    def sums(self) -> Tensor:
        """Everything as one vector of fp64 on the host, which may be summed over ranks."""
        counts = self._counts
        if counts is None:
            counts = torch.zeros(2 * self.num_experts, dtype=torch.int64)
        losses, known = [], []
        for name in LOSSES:
            losses.append(float(self._losses.get(name, 0.0)))
            known.append(float(self._forwards if name in self._losses else 0))
        here = float(self._forwards > 0)  # not so where another stage of a pipeline has the layer
        rest = [*losses, *known, float(self._nbytes), self._seconds, here]
        return torch.cat((counts.double().cpu(), torch.tensor(rest, dtype=torch.float64)))


def numbers(sums: Tensor) -> Numbers:
    """From :meth:`Statistics.sums` of one layer, of one rank or of several together."""
    tail = sums[-(2 * len(LOSSES) + 3) :].tolist()
    wanted, kept = sums[: -len(tail)].chunk(2)
    totals, known = tail[: len(LOSSES)], tail[len(LOSSES) : 2 * len(LOSSES)]
    nbytes, seconds, ranks = tail[-3:]
    mean = float(wanted.mean())
    return Numbers(
        tokens_per_expert=tuple(int(n) for n in wanted.tolist()),
        drop_rate=1 - float(kept.sum()) / float(wanted.sum()) if mean else 0.0,
        max_vio=(float(wanted.max()) - mean) / mean if mean else 0.0,
        losses={name: total / n for name, total, n in zip(LOSSES, totals, known, strict=True) if n},
        all_to_all_bytes=int(nbytes),
        all_to_all_seconds=seconds / max(1.0, ranks),
    )
