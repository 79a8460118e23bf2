"""ZeRO's formulas for state and traffic, worked out from shapes alone.

State (arXiv:1910.02054, section 5): parameters, gradients and optimizer state are each held whole
or cut over N ranks. Traffic (section 7): one reduce-scatter and one all-gather of the model per
step for stages 0-2, one reduce-scatter and two all-gathers for stage 3.

The padding follows the documented rule: a segment (one unit, dtype, trainable or not) holds its
parameters at multiples of 16 elements and is rounded up to a multiple of 16 x N elements.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 16


def _up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def unit(names: Sequence[str], cut: str) -> str:
    """The unit of a parameter with these names; the root if they are in different units."""

    def one(name: str) -> str:
        module = name.rpartition(".")[0]
        if cut == "model":
            return ""
        if cut == "leaf":
            return module
        if cut == "block":
            found = re.match(r"((?:\w+\.)*?\d+)(\.|$)", module)
            return found[1] if found else ""
        parts = module.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        patterns = cut.split(",")
        hits = [p for p in paths if any(fnmatch.fnmatchcase(p, q) for q in patterns)]
        return hits[0] if hits else ""

    found = {one(name) for name in names}
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class Sizes:
    """Elements of a model as it lies in segments: ``plain`` without padding, ``padded`` with."""

    plain: int
    padded: int

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(self.plain + other.plain, self.padded + other.padded)


def sizes(
    module: nn.Module,
    num_shards: int,
    cut: str = "block",
    *,
    trainable: bool,
    only: str | None = None,
) -> Sizes:
    """Elements of the trainable (or frozen) parameters; ``only`` restricts to one unit."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    segments: dict[tuple[str, torch.dtype], list[int]] = {}
    for parameter, called in names.items():
        if parameter.requires_grad == trainable:
            where = unit(called, cut)
            if only is None or where == only:
                segments.setdefault((where, parameter.dtype), []).append(parameter.numel())
    total = Sizes(0, 0)
    for numels in segments.values():
        used = sum(_up(n, ALIGN) for n in numels[:-1]) + numels[-1]
        total += Sizes(sum(numels), _up(used, ALIGN * num_shards))
    return total


@dataclass(frozen=True)
class State:
    """Bytes of one rank, padding included; ``ideal`` is the published formula without padding."""

    params: int
    grads: int
    optim: int
    ideal: float

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optim


def state_bytes(
    module: nn.Module,
    stage: int,
    num_shards: int,
    cut: str = "block",
    *,
    param_size: int = 4,
    grad_size: int = 4,
    optim_size: int = 8,
    summed_apart: bool = False,
) -> State:
    """What one of ``num_shards`` ranks holds; sizes are bytes per element of each kind.

    ``summed_apart``: micro-batches are reduced one by one (``zero.reduce=each``, more than one).
    Where gradients are whole, the sum of this rank's slice then needs a place of its own.
    """
    train = sizes(module, num_shards, cut, trainable=True)
    frozen = sizes(module, num_shards, cut, trainable=False)
    part = [num_shards if stage >= at else 1 for at in (3, 2, 1)]
    apart = int(summed_apart and part[1] == 1)
    return State(
        params=(train.padded + frozen.padded) * param_size // part[0],
        grads=train.padded * grad_size // part[1] + apart * train.padded * grad_size // num_shards,
        optim=train.padded * optim_size // part[2],
        ideal=(train.plain + frozen.plain) * param_size / part[0]
        + train.plain * grad_size * (1 / part[1] + apart / num_shards)
        + train.plain * optim_size / part[2],
    )


def traffic_bytes(
    module: nn.Module,
    stage: int,
    num_ranks: int,
    cut: str = "block",
    *,
    micro_batches: int = 1,
    reduce: str = "auto",
    reshard: str = "true",
    param_size: int = 4,
    wire_size: int = 4,
) -> dict[str, int]:
    """Bytes one rank sends in one step, ``(N-1)/N`` of the padded model per collective.

    Stages 0 and 1 reduce once per step and stages 2 and 3 in every micro-batch, unless ``reduce``
    says otherwise. ``reshard`` is ``zero.reshard_after_forward``.
    """
    train = sizes(module, num_ranks, cut, trainable=True).padded
    frozen = sizes(module, num_ranks, cut, trainable=False).padded
    root = sum(sizes(module, num_ranks, cut, trainable=t, only="").padded for t in (True, False))
    times = micro_batches if reduce == "each" or (reduce == "auto" and stage >= 2) else 1

    def share(elements: int, size: int) -> int:
        return elements * size * (num_ranks - 1) // num_ranks

    if stage == 3:
        kept = {"true": 0, "auto": root, "false": train + frozen}[reshard]
        gathered = micro_batches * share(2 * (train + frozen) - kept, param_size)
    else:
        gathered = share(train, wire_size if stage == 0 else param_size)
    return {"reduce_scatter": times * share(train, wire_size), "all_gather": gathered}
