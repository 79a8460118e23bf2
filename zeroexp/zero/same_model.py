"""Whether all ranks built the same model: asked before anything of it is sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroexp.comm import Group, World
from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import RankMismatch
from zeroexp.layout import ParamSpec, Share
from zeroexp.zero.part import Part

_WHAT = "comparison of the ranks' models"


def compare_parameters(
    world: World, specs: Sequence[ParamSpec], shares: Mapping[str, Share], part: Part | None
) -> None:
    """Raise :class:`RankMismatch` on every rank when parameters differ in name, shape, dtype,
    order, group, in whether they are trained, or in the stage that holds them (collective).
    ``specs`` are those of all parts of the module; ``shares``: by name, of those that have another
    one on other ranks."""
    mine = {_called(s.name, shares): _of_parameter(s, shares, part) for s in specs}
    problem = _difference(world.control, mine)
    if world.pipe.size > 1:
        # Of each part one rank is here, so what any part found is known to every rank.
        found = exchange_notes(world.pipe, problem, _WHAT)
        problem = next((p for p in found if p), None) or _difference(world.pipe, mine)
    if problem:
        raise RankMismatch(problem)


def compare_buffers(
    control: Group, buffers: Mapping[str, Tensor], shares: Mapping[str, Share]
) -> None:
    """The same for buffers."""
    mine = {
        _called(n, shares): f"buffer of shape {tuple(b.shape)}, {b.dtype}"
        for n, b in buffers.items()
    }
    if problem := _difference(control, mine):
        raise RankMismatch(problem)


def _called(name: str, shares: Mapping[str, Share]) -> str:
    """What it is called on the rank that has the first share."""
    return shares[name].name(name, 0) if name in shares else name


def _of_parameter(spec: ParamSpec, shares: Mapping[str, Share], part: Part | None) -> str:
    use = f"optimizer group {spec.group}" if spec.trainable else "not trained"
    share = shares.get(spec.name)
    names = [share.name(n, 0) for n in spec.aliases] if share else spec.aliases
    tied = f", tied to {', '.join(names)}" if names else ""
    spread = f", over {spec.spread} ranks" if spec.spread > 1 else ""
    held = "" if part is None else f", in place {_listed(part.holders[spec.name])} of the pipe"
    return f"shape {spec.shape}, {spec.dtype}, {use}{tied}{spread}{held}"


def _listed(places: Sequence[int]) -> str:
    return " and ".join(map(str, places))


def _difference(group: Group, mine: Mapping[str, str]) -> str | None:
    """What differs between the ranks of ``group``, the same words on each."""
    digest = zlib.crc32(repr(list(mine.items())).encode())
    sums = group.exchange(torch.tensor([digest]), _WHAT).flatten().tolist()
    if len(set(sums)) == 1:
        return None
    notes = exchange_notes(group, list(mine.items()), _WHAT)
    at = next(i for i, total in enumerate(sums) if total != sums[0])
    first, other = group.ranks[0], group.ranks[at]
    theirs, ours = dict(notes[at]), dict(notes[0])
    names = [n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n)]
    if names:
        name = names[0]
        difference = f"rank {first} has {_said(name, ours)}; rank {other} has {_said(name, theirs)}"
    else:
        difference = f"rank {first} and rank {other} have the same names in another order"
    return (
        f"the ranks built different models: {difference}. Build the same model, with the same "
        "parameters frozen and the same optimizer groups, on every rank."
    )


def _said(name: str, facts: Mapping[str, str]) -> str:
    return f"{name} ({facts[name]})" if name in facts else f"no {name}"
