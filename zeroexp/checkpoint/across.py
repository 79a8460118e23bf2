"""Between rank 0, which reads and writes checkpoints, and the parts of a model in a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm import Group, World
from zeroexp.comm.notes import exchange_notes


def note_of_rank_0(world: World, note: Any, what: str) -> Any:
    """Rank 0's ``note`` (anything JSON can hold) on every rank of all parts."""
    note = exchange_notes(world.control, note, what)[0]
    return note if world.pipe.size == 1 else exchange_notes(world.pipe, note, what)[0]


def collect(
    world: World, mine: Mapping[str, Tensor], device: torch.device, what: str, *, everywhere: bool
) -> dict[str, Tensor]:
    """The CPU tensors of all parts by name: on rank 0, or ``everywhere`` in this pipe.

    To be called by the first rank of each part, or with ``everywhere`` by all ranks.
    """
    pipe = world.pipe
    if pipe.size == 1:
        return dict(mine)
    metas = exchange_notes(pipe, {name: _meta(t) for name, t in mine.items()}, what)
    found = {}
    for source, described in enumerate(metas):
        for name, meta in described.items():
            tensor = mine[name] if source == pipe.index else _empty(meta)
            for target in range(pipe.size) if everywhere else (0,):
                _send(pipe, tensor, source, target, device, what)
            if everywhere or pipe.index == 0:
                found[name] = tensor
    return found


def hand_out(
    world: World, state: Mapping[str, Tensor], wanted: list[str], device: torch.device, what: str
) -> dict[str, Tensor]:
    """What rank 0 has in ``state`` under the names that this part wants, on the first rank of each
    part; to be called by those."""
    pipe = world.pipe
    if pipe.size == 1:
        return {name: state[name] for name in wanted if name in state}
    named = exchange_notes(pipe, wanted, what)
    metas = {name: _meta(t) for name, t in state.items()} if pipe.index == 0 else {}
    metas = exchange_notes(pipe, metas, what)[0]
    found = {}
    for target, names in enumerate(named):
        for name in names:
            if name not in metas or pipe.index not in (0, target):
                continue
            tensor = state[name] if pipe.index == 0 else _empty(metas[name])
            _send(pipe, tensor, 0, target, device, what)
            if pipe.index == target:
                found[name] = tensor
    return found


def _meta(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(meta: list[Any]) -> Tensor:
    return torch.empty(meta[1], dtype=getattr(torch, meta[0]))


def _send(
    pipe: Group, tensor: Tensor, source: int, target: int, device: torch.device, what: str
) -> None:
    """Fill ``target``'s ``tensor`` from ``source``'s; the pipe's other ranks may call it too."""
    if source == target or not tensor.numel():
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).to(device)
    nothing = flat[:0]
    counts = [flat.numel() if i == (target if pipe.index == source else source) else 0
              for i in range(pipe.size)]  # fmt: skip
    none = [0] * pipe.size
    sends, receives = pipe.index == source, pipe.index == target
    pipe.all_to_all(
        flat if receives else nothing,
        flat if sends else nothing,
        received=counts if receives else none,
        sent=counts if sends else none,
        tag=0,
        what=what,
    ).wait()
    if receives:
        tensor.copy_(flat.to(tensor.device).view(tensor.dtype).view(tensor.shape))
