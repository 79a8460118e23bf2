"""Whole parameters for a moment: to read them, or to edit them on one rank for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zeroexp.comm import World
from zeroexp.errors import ModelError
from zeroexp.zero.access import whole
from zeroexp.zero.registry import owner_of


@contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify_rank: int | None = None
) -> Iterator[None]:
    """Inside, ``params`` (of an engine's module) are whole on every rank; every rank must enter.

    With ``modify_rank`` what that rank writes is kept and reaches the others, unless the body
    raises: then nothing is kept. Of experts that it does not hold, what the first rank that does
    writes counts. Without it the
    parameters are read-only: an in-place write raises :class:`ModelError` at the end, since it
    would be lost. Parameters that no engine manages are whole already.
    """
    wanted = _list(params)
    owners = {id(o): o for p in wanted if (o := owner_of(p)) is not None}
    with whole(owners.values(), edit=modify_rank is not None):
        if modify_rank is not None:
            yield
            if owners:
                _spread(next(iter(owners.values())).world, wanted, modify_rank)
            return
        versions = [p._version for p in wanted]
        before = [p.detach().clone() for p in wanted]
        try:
            yield
        finally:
            changed = [
                i for i, (p, v) in enumerate(zip(wanted, versions, strict=True)) if p._version != v
            ]
            with torch.no_grad():
                for i in changed:
                    wanted[i].copy_(before[i])
        if owners:  # a write on one rank is an error on all of them
            world = next(iter(owners.values())).world
            first = torch.tensor([changed[0] if changed else -1])
            rows = world.control.exchange(first, "check of read-only parameters").flatten().tolist()
            changed = [i for i in rows if i >= 0]
        if changed:
            raise ModelError(
                f"a parameter of shape {tuple(wanted[changed[0]].shape)} was written inside "
                "gathered(); the write was "
                "undone. Pass modify_rank, the rank whose values count."
            )


def _spread(world: World, params: list[nn.Parameter], source: int) -> None:
    if not 0 <= source < world.size:
        raise ModelError(f"modify_rank={source} is not one of the {world.size} ranks")
    with torch.no_grad():
        for number, param in enumerate(params):
            owner = owner_of(param)
            holders = world.control if owner is None else owner.holders(param)
            first = holders.ranks.index(source) if source in holders.ranks else 0
            value = param.detach().contiguous()
            holders.broadcast(
                value, source=first, tag=number, what="broadcast of an edited parameter"
            ).wait()
            if value.data_ptr() != param.data_ptr():
                param.copy_(value)


def _list(params: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, nn.Parameter):
        return [params]
    return list(params)
