"""Rows in another order, whose backward is the inverse order: no zeros first, no additions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Permutation:
    """``order[i]`` is the row that comes to place i."""

    def __init__(self, order: Tensor) -> None:
        self._order = order
        self._inverse = torch.empty_like(order)
        self._inverse[order] = torch.arange(order.numel(), device=order.device)

    def apply(self, rows: Tensor) -> Tensor:
        out: Tensor = _Permute.apply(rows, self._order, self._inverse)  # type: ignore[no-untyped-call]
        return out

    def undo(self, rows: Tensor) -> Tensor:
        out: Tensor = _Permute.apply(rows, self._inverse, self._order)  # type: ignore[no-untyped-call]
        return out
