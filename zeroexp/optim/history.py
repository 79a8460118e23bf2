"""Parameters that share one history are stepped as one flat tensor; those that part ways get
tensors of their own.

torch skips a parameter whose gradient is ``None``: no decay, no momentum, no step count. A flat
shard must do the same for each parameter in it, so it is split where histories differ and only
then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroexp.layout import Segment
from zeroexp.optim.face import State


@dataclass
class Run:
    """A range of the stepped tensor whose parameters (``slots``) have one history; ``tensor`` is
    the optimizer's key."""

    start: int
    stop: int
    slots: list[int]
    tensor: Tensor = field(repr=False)


class History:
    """The runs of one segment's stepped tensor ``master``.

    ``whole`` gives each parameter a tensor of its own shape from the start, for optimizers that
    look at matrices; it needs the whole segment in ``master``.
    """

    def __init__(self, spec: Segment, master: Tensor, index: int | None, *, whole: bool) -> None:
        self._master = master
        self._spec = spec
        self._whole = whole
        base = 0 if index is None else spec.bounds(index)[0]
        stop = master.numel()
        starts: list[tuple[int, int]] = []  # (slot, first element in master)
        for i, slot in enumerate(spec.slots):
            lo, hi = max(0, slot.offset - base), min(stop, slot.stop - base)
            if lo < hi or (slot.spec.numel == 0 and 0 <= slot.offset - base < stop):
                starts.append((i, lo))
        self._starts = starts
        if whole:
            self.runs = [
                Run(s.offset, s.stop, [i], master[s.offset : s.stop].view(s.spec.shape))
                for i, s in enumerate(spec.slots)
            ]
        else:
            self.runs = [Run(0, stop, [i for i, _ in starts], master)]

    def split(self, labels: Sequence[Hashable], state: State) -> None:
        """Cut runs so that all parameters of one have the same label; ``labels`` are per slot of
        the segment."""
        if self._whole:
            return
        out: list[Run] = []
        for run in self.runs:
            if len({labels[i] for i in run.slots}) <= 1:
                out.append(run)
            else:
                out.extend(self._cut(run, labels, state))
        self.runs = out

    def _cut(self, run: Run, labels: Sequence[Hashable], state: State) -> list[Run]:
        first = {i: at for i, at in self._starts}
        groups: list[list[int]] = []
        for i in run.slots:
            if groups and labels[groups[-1][-1]] == labels[i]:
                groups[-1].append(i)
            else:
                groups.append([i])
        starts = [run.start, *(first[g[0]] for g in groups[1:])]
        stops = [*starts[1:], run.stop]
        old = state.pop(run.tensor, None)
        parts = []
        for slots, start, stop in zip(groups, starts, stops, strict=True):
            part = Run(start, stop, slots, self._master[start:stop])
            if old is not None:
                state[part.tensor] = _share(old, run, part)
            parts.append(part)
        return parts

    def present(self, run: Run, touched: Sequence[bool]) -> bool:
        """Whether ``run`` is stepped; a run of padding alone goes with the segment."""
        return touched[run.slots[0]] if run.slots else any(touched)


def _share(old: dict[str, Any], run: Run, part: Run) -> dict[str, Any]:
    """The part's share of a run's state: slices of what is per element, copies of what is per
    tensor."""
    numel = run.stop - run.start
    out: dict[str, Any] = {}
    for key, value in old.items():
        if isinstance(value, Tensor) and value.numel() == numel and value.dim() == 1:
            out[key] = value[part.start - run.start : part.stop - run.start]
        elif isinstance(value, Tensor):
            out[key] = value.clone()
        else:
            out[key] = value
    return out


def per_element(value: Any, run: Run) -> bool:
    """Whether a state entry has one value per element of ``run``."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.numel() == run.stop - run.start
    )
