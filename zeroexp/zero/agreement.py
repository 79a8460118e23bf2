"""What the ranks must agree on before a step: non-finite gradients, the global norm, who got
gradients, late arrivals.

One small exchange carries all of it. The norm sums owned shards in fp64 in rank order, at every
stage, so clipping does not depend on the stage or the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zeroexp.comm import World
from zeroexp.comm.notes import exchange_notes
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.unit import UnitState


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    sum_squares: float
    """Of the reduced, still scaled gradients; not finite when any of them is not."""
    late: tuple[int, ...]
    """Indices of units that still wait for a reduction on some rank."""
    touched: tuple[tuple[bool, ...], ...]
    """Per segment and slot: whether any rank had a gradient."""
    same_order: bool
    """Whether all ranks used the units in the same order."""
    bad_loss_ranks: tuple[int, ...]
    """Ranks whose own loss was not finite."""

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite, and all losses: one that is not may still leave finite
        gradients, and training on would report a run that learned from nothing."""
        return math.isfinite(self.sum_squares) and not self.bad_loss_ranks


def local_sum_squares(segments: Sequence[SegmentState]) -> float:
    """Sum of squares of the owned gradients of this rank."""
    return sum(s.grads.sum_squares() for s in segments if s.counted and s.grads.has_owned)


def agree(
    world: World,
    units: Sequence[UnitState],
    segments: Sequence[SegmentState],
    *,
    digest: int,
    loss_finite: bool,
) -> Agreement:
    """Exchange and combine what each rank knows. ``digest`` identifies the order in which it used
    the units."""
    head = torch.tensor(
        [local_sum_squares(segments), float(digest), float(loss_finite)], dtype=torch.float64
    )
    late = torch.tensor([u.pending_window for u in units], dtype=torch.uint8)
    touched = torch.tensor([t for s in segments for t in s.grads.touched], dtype=torch.uint8)
    rows = world.control.exchange(
        torch.cat([head.view(torch.uint8), late, touched]), "agreement on the gradients"
    )
    heads = rows[:, : head.nbytes].flatten().clone().view(torch.float64).view(-1, len(head))
    late_any = rows[:, head.nbytes : head.nbytes + len(late)].amax(dim=0)
    touched_any = rows[:, head.nbytes + len(late) :].amax(dim=0).bool().tolist()
    total = 0.0
    ranks = world.control.ranks
    for rank in world.gather.ranks:  # replicas hold the same shards: count one set
        total += float(heads[ranks.index(rank), 0])
    per_segment, at = [], 0
    for segment in segments:
        per_segment.append(tuple(touched_any[at : at + len(segment.grads.touched)]))
        at += len(segment.grads.touched)
    return Agreement(
        sum_squares=total,
        late=tuple(late_any.nonzero().flatten().tolist()),
        touched=tuple(per_segment),
        same_order=bool((heads[:, 1] == heads[0, 1]).all()),
        bad_loss_ranks=tuple(ranks[i] for i in (heads[:, 2] == 0).nonzero().flatten().tolist()),
    )


def over_the_pipe(world: World, agreement: Agreement) -> Agreement:
    """``agreement`` with the norm and the losses of all parts of the model (collective over the
    pipe)."""
    if world.pipe.size == 1:
        return agreement
    flags = [float(rank in agreement.bad_loss_ranks) for rank in world.control.ranks]
    row = torch.tensor([agreement.sum_squares, *flags], dtype=torch.float64)
    rows = world.pipe.exchange(row, "agreement on the gradients of all stages")
    bad = rows[:, 1:].flatten().nonzero().flatten()  # rank r of a part p is p * size + r
    return replace(
        agreement, sum_squares=sum(rows[:, 0].tolist()), bad_loss_ranks=tuple(bad.tolist())
    )


def first_nonfinite(world: World, segments: Sequence[SegmentState]) -> tuple[str, int]:
    """Name and owning rank of the first parameter, in model order, whose reduced gradient is not
    finite (collective)."""
    mine = -1
    names = [slot.spec.name for s in segments for slot in s.spec.slots]
    base = 0
    for segment in segments:
        grads = segment.grads
        if mine < 0 and grads.has_owned and not grads.finite:
            with grads.at_hand() as owned:
                for piece in segment.spec.pieces(segment.index):
                    part = owned[piece.shard_start : piece.shard_start + piece.numel]
                    if not bool(torch.isfinite(part).all()):
                        mine = base + segment.spec.slots.index(piece.slot)
                        break
        base += len(segment.spec.slots)
    what = "search for the non-finite gradient"
    rows = world.control.exchange(torch.tensor([mine]), what).flatten().tolist()
    found = [(int(v), r) for v, r in zip(rows, world.control.ranks, strict=True) if v >= 0]
    index, rank = min(found, default=(-1, -1))
    stages = exchange_notes(world.pipe, [names[index] if found else "unknown", rank], what)
    name, rank = next((each for each in stages if each[1] >= 0), stages[0])
    return str(name), int(rank)
