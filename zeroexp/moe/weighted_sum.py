"""Outputs of experts, weighted and added up per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _WeightedSum(torch.autograd.Function):
    backward_may_repeat = True  # where a pipeline splits it

    # index_add by itself would keep the weighted rows for its backward, beside the rows.
    @staticmethod
    def forward(
        ctx: Any, rows_AC: Tensor, weight_A: Tensor, token_A: Tensor, tokens: int
    ) -> Tensor:
        ctx.save_for_backward(rows_AC, weight_A, token_A)
        y_SC = rows_AC.new_zeros(tokens, rows_AC.shape[1])
        return y_SC.index_add_(0, token_A, rows_AC * weight_A.to(rows_AC.dtype).unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SC: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_AC, weight_A, token_A = ctx.saved_tensors
        grad_AC = grad_SC.index_select(0, token_A)
        to_rows = to_weight = None
        if ctx.needs_input_grad[1]:
            # In the dtype of the weights, which is wider: the gate learns from this sum alone.
            to_weight = torch.linalg.vecdot(grad_AC.to(weight_A.dtype), rows_AC.to(weight_A.dtype))
        if ctx.needs_input_grad[0]:
            to_rows = grad_AC.mul_(weight_A.to(grad_AC.dtype).unsqueeze(1))
        return to_rows, to_weight, None, None


def weighted_sum(rows_AC: Tensor, weight_A: Tensor, token_A: Tensor, tokens: int) -> Tensor:
    """Row s of the result ``[tokens, C]`` is the sum of ``weight[a] * rows[a]`` over all a with
    ``token[a] == s``, in the dtype of the rows; zeros where there is none.

    On CUDA the order of three or more summands is not fixed, unless
    ``torch.use_deterministic_algorithms`` is on.
    """
    out: Tensor = _WeightedSum.apply(  # type: ignore[no-untyped-call]
        rows_AC, weight_A, token_A, tokens
    )
    return out
