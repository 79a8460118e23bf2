"""Whether all ranks built the same model: asked before anything of it is sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroexp.comm import Group
from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import RankMismatch
from zeroexp.layout import ParamSpec, Share


def compare_parameters(
    control: Group, specs: Sequence[ParamSpec], shares: Mapping[str, Share]
) -> None:
    """Raise :class:`RankMismatch` on every rank when parameters differ in name, shape, dtype,
    order, group, or in whether they are trained (collective). ``shares``: by name, of those that
    have another one on other ranks."""
    _compare(control, {_called(s.name, shares): _of_parameter(s, shares) for s in specs})


def compare_buffers(
    control: Group, buffers: Mapping[str, Tensor], shares: Mapping[str, Share]
) -> None:
    """The same for buffers."""
    _compare(
        control,
        {
            _called(n, shares): f"buffer of shape {tuple(b.shape)}, {b.dtype}"
            for n, b in buffers.items()
        },
    )


def _called(name: str, shares: Mapping[str, Share]) -> str:
    """What it is called on the rank that has the first share."""
    return shares[name].name(name, 0) if name in shares else name


def _of_parameter(spec: ParamSpec, shares: Mapping[str, Share]) -> str:
    use = f"optimizer group {spec.group}" if spec.trainable else "not trained"
    share = shares.get(spec.name)
    names = [share.name(n, 0) for n in spec.aliases] if share else spec.aliases
    tied = f", tied to {', '.join(names)}" if names else ""
    spread = f", over {spec.spread} ranks" if spec.spread > 1 else ""
    return f"shape {spec.shape}, {spec.dtype}, {use}{tied}{spread}"


def _compare(control: Group, mine: Mapping[str, str]) -> None:
    what = "comparison of the ranks' models"
    digest = zlib.crc32(repr(list(mine.items())).encode())
    sums = control.exchange(torch.tensor([digest]), what).flatten().tolist()
    if len(set(sums)) == 1:
        return
    notes = exchange_notes(control, list(mine.items()), what)
    other = next(rank for rank, total in enumerate(sums) if total != sums[0])
    theirs, ours = dict(notes[other]), dict(notes[0])
    names = [n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n)]
    if names:
        name = names[0]
        difference = f"rank 0 has {_said(name, ours)}; rank {other} has {_said(name, theirs)}"
    else:
        difference = f"rank 0 and rank {other} have the same names in another order"
    raise RankMismatch(
        f"the ranks built different models: {difference}. Build the same model, with the same "
        "parameters frozen and the same optimizer groups, on every rank."
    )


def _said(name: str, facts: Mapping[str, str]) -> str:
    return f"{name} ({facts[name]})" if name in facts else f"no {name}"
