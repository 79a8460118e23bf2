"""Which state an optimizer keeps per element, known before it has stepped anything: what goes to a
file needs its place in it first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.errors import OptimizerError
from zeroexp.optim.trial import trial

_SHAPE, _STEPS = (4, 6), 3


class Column(NamedTuple):
    """One value per element: the name of the state entry, and its dtype."""

    name: str
    dtype: torch.dtype


def state_columns(optimizer: Optimizer, group: int, dtype: torch.dtype) -> tuple[Column, ...]:
    """The columns for parameters of ``dtype`` in parameter group ``group`` of ``optimizer``.

    A twin of the optimizer steps a small tensor three times; what it then holds with the shape of
    the tensor is per element. Raises :class:`OptimizerError` when the twin cannot step.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator).to(dtype)
    grads = [[torch.randn(_SHAPE, generator=generator).to(dtype)] for _ in range(_STEPS)]
    try:
        _, (state,) = trial(optimizer, [start], grads, group)
    except Exception as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} could not be tried on a small matrix ({error}), so what "
            "it keeps per element is not known before its first step, and no place on disk can be "
            "reserved for it. Use offload=cpu, or an optimizer that steps any matrix."
        ) from error
    return tuple(
        Column(name, value.dtype)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == _SHAPE
    )
