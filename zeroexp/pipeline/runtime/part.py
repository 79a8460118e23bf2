"""What of a module a rank of the pipe holds, once its layers are cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zeroexp.errors import ModelError
from zeroexp.pipeline.cut import Cut
from zeroexp.pipeline.runtime.split import Layered, NamedLayer
from zeroexp.zero.part import Part


def layered_in(module: nn.Module) -> nn.Module:
    """The part of ``module`` that is cut: itself or one of its children, with all its parameters.

    Raises :class:`ModelError` where nothing in it offers layers.
    """
    total = len(list(module.parameters()))
    for candidate in (module, *module.children()):
        offers = isinstance(candidate, (Layered, nn.Sequential))
        if offers and total and len(list(candidate.parameters())) == total:
            return candidate
    raise ModelError(
        f"{type(module).__name__} cannot be cut into stages: neither it nor a module in it that "
        "holds all its parameters is an nn.Sequential or offers layers. Give one a method "
        "pipeline_layers() that returns (name, module) pairs in order, each module taking what "
        "the one before returns"
    )


def part_of(
    module: nn.Module, layers: Sequence[NamedLayer], where: Cut, rank_of: Sequence[int], index: int
) -> Part:
    """The part of ``module`` on the pipe's rank ``index``; stage s lies on ``rank_of[s]``. Buffers
    outside of all layers are on every rank."""
    users: dict[int, set[int]] = {}
    for stage, rank in enumerate(rank_of):
        for number in where.stage(stage):
            layer = layers[number][1]
            for tensor in (*layer.parameters(), *layer.buffers()):
                users.setdefault(id(tensor), set()).add(rank)
    count = max(rank_of) + 1
    everyone = set(range(count))
    named = (  # with the other names of what is tied: they are in a state_dict too
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    holders = {name: tuple(sorted(users.get(id(t), everyone))) for name, t in named}
    return Part(count, index, holders)
