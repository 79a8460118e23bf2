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
from zeroexp.zero.model import ShardedModel
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


def local_sum_squares(segments: Sequence[SegmentState]) -> dict[int, float]:
    """Sums of squares of the owned gradients of this rank, by the spread of the parameters."""
    sums = dict.fromkeys(sorted({s.spec.spread for s in segments}), 0.0)
    for segment in segments:
        if segment.counted and segment.grads.has_owned:
            sums[segment.spec.spread] += segment.grads.sum_squares()
    return sums


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
    squares = local_sum_squares(segments)
    head = torch.tensor([float(digest), float(loss_finite), *squares.values()], dtype=torch.float64)
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
    for column, spread in enumerate(squares, start=2):
        for rank in world.sharing(spread).counted:  # replicas hold the same shards: count one set
            total += float(heads[ranks.index(rank), column])
    per_segment, at = [], 0
    for segment in segments:
        per_segment.append(tuple(touched_any[at : at + len(segment.grads.touched)]))
        at += len(segment.grads.touched)
    return Agreement(
        sum_squares=total,
        late=tuple(late_any.nonzero().flatten().tolist()),
        touched=tuple(per_segment),
        same_order=bool((heads[:, 0] == heads[0, 0]).all()),
        bad_loss_ranks=tuple(ranks[i] for i in (heads[:, 1] == 0).nonzero().flatten().tolist()),
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


def first_nonfinite(model: ShardedModel, segments: Sequence[SegmentState]) -> tuple[str, int]:
    """Name and owning rank of the first parameter, in model order, whose reduced gradient is not
    finite (collective). Of stacked experts the name is followed by the number of the expert."""
    mine, name = -1, ""
    base = 0
    for segment in segments:
        grads = segment.grads
        if mine < 0 and grads.has_owned and not grads.finite:
            with grads.at_hand() as owned:
                for piece in segment.spec.pieces(segment.index):
                    part = owned[piece.shard_start : piece.shard_start + piece.numel]
                    if not bool(torch.isfinite(part).all()):
                        slot = segment.spec.slots.index(piece.slot)
                        first = int(part.isfinite().logical_not().nonzero()[0])
                        mine = base + slot
                        name = _named(model, segment, slot, piece.param_start + first)
                        break
        base += len(segment.spec.slots)
    world, what = model.around.world, "search for the non-finite gradient"
    notes = exchange_notes(world.control, [mine, name], what)
    found = [
        (at, rank, called)
        for rank, (at, called) in zip(world.control.ranks, notes, strict=True)
        if at >= 0
    ]
    _, rank, name = min(found, default=(-1, -1, "unknown"))
    stages = exchange_notes(world.pipe, [name, rank], what)
    name, rank = next((each for each in stages if each[1] >= 0), stages[0])
    return str(name), int(rank)


def _named(model: ShardedModel, segment: SegmentState, slot: int, element: int) -> str:
    """The parameter in ``slot``, with the slice of the whole one that ``element`` is in."""
    spec = segment.spec.slots[slot].spec
    share = model.shares.get(id(segment.params[slot]))
    if share is None or share.ends:
        return spec.name
    here = spec.shape[0]
    return f"{spec.name}[{share.index * here + element // (spec.numel // here)}]"
