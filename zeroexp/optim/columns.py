"""Which state an optimizer keeps per element, known before it has stepped anything: what goes to a
file needs its place in it first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.errors import OptimizerError
from zeroexp.optim.trial import trial

ANY_SHAPE: tuple[int, ...] = (4, 6)
"""What an optimizer is tried on that treats every element on its own."""

_STEPS = 3


class Column(NamedTuple):
    """One value per element: the name of the state entry, and its dtype."""

    name: str
    dtype: torch.dtype


def state_columns(
    optimizer: Optimizer,
    group: int,
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, ...]] = (ANY_SHAPE,),
) -> tuple[Column, ...]:
    """The columns for parameters of ``dtype`` and ``shapes`` in parameter group ``group`` of
    ``optimizer``.

    A twin of the optimizer steps a small tensor like each of them three times; what it then holds
    with the shape of the tensor is per element. (Adafactor keeps factors of a matrix, and one value
    per element of a vector.) Raises :class:`OptimizerError` when the twin cannot step.
    """
    found: dict[str, Column] = {}
    for shape in dict.fromkeys(map(_small, shapes)):
        for name, value in _tried(optimizer, group, dtype, shape).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape:
                found.setdefault(name, Column(name, value.dtype))
    return tuple(found.values())


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with as many dimensions, each of another size; what is 1 stays 1."""
    return tuple(min(size, 4 + 2 * place) for place, size in enumerate(shape))


def _tried(
    optimizer: Optimizer, group: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator).to(dtype)
    grads = [[torch.randn(shape, generator=generator).to(dtype)] for _ in range(_STEPS)]
    try:
        _, (state,) = trial(optimizer, [start], grads, group)
    except Exception as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} could not be tried on a small tensor of shape {shape} "
            f"({error}), so what it keeps per element is not known before its first step, and no "
            "place on disk can be reserved for it. Use offload=cpu, or an optimizer that steps any "
            "tensor."
        ) from error
    return state
