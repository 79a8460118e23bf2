"""Weights that stages of a pipeline share, as an embedding and the head do: every copy is stepped
with the sum of the gradients of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroexp.comm import Group
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.part import Part
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.segment import SegmentState


class Ties:
    """The tied weights of ``model``. A copy has a segment of its own, cut over as many ranks on
    every stage, so what is owned here is owned there. Copies start as the first holder's."""

    def __init__(self, model: ShardedModel, part: Part, reducer: Reducer) -> None:
        self._model, self._part, self._reducer = model, part, reducer
        self._tags = {name: tag for tag, name in enumerate(part.tied)}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._share_values()

    def _of(self, segments: Sequence[SegmentState]) -> list[tuple[str, SegmentState]]:
        """Tied weights in the order of their names, the same on every holder."""
        found = [(s.spec.slots[0].spec.name, s) for s in segments if s.spec.slots[0].spec.tied]
        return sorted(found, key=lambda pair: pair[0])

    def _group(self, name: str) -> Group:
        holders = self._part.holders[name]
        if holders not in self._groups:
            self._groups[holders] = self._model.around.world.between(holders)
        return self._groups[holders]

    @torch.no_grad()
    def _share_values(self) -> None:
        for name, segment in self._of(self._model.segments):
            values = self._model.master_whole(segment).clone()
            self._group(name).broadcast(
                values, source=0, tag=self._tags[name], what=f"first value of the tied {name}"
            ).wait()
            segment.assign(values)

    @torch.no_grad()
    def sum_gradients(self, segments: Sequence[SegmentState], touched: Sequence[bool]) -> bool:
        """Give each copy the sum of the owned, reduced gradients of all; whether there are tied
        weights (collective over the pipe). ``touched``: of each segment, whether any data-parallel
        rank had a gradient for it."""
        tied = self._of(segments)
        had = {id(s): had for s, had in zip(segments, touched, strict=True)}
        summed = [
            (name, segment)
            for name, segment in tied
            if self._anywhere(self._group(name), name, had[id(segment)])
        ]
        for _, segment in summed:
            self._take_part(segment)
        for name, segment in summed:
            with segment.grads.at_hand(edits=True) as owned:
                self._sum(name, owned)
        return bool(tied)

    def _anywhere(self, group: Group, name: str, here: bool) -> bool:
        row = torch.tensor([float(here)])
        return bool(group.exchange(row, f"who has a gradient of the tied {name}").any())

    def _take_part(self, segment: SegmentState) -> None:
        """A copy that got no gradient itself takes part with zeros: all are stepped, or none."""
        if not segment.grads.has_owned:
            unit = self._model.place[id(segment.params[0])][0]
            self._reducer.flush([unit])
        segment.grads.touched = [True]

    def _sum(self, name: str, owned: Tensor) -> None:
        here = owned.to(self._model.around.device)  # itself, unless it is off the device
        self._group(name).all_reduce(
            here, tag=self._tags[name], what=f"sum of the gradients of the tied {name}"
        ).wait()
        owned.copy_(here)
