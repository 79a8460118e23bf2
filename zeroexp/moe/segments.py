"""One matrix product per expert over rows that are sorted by expert.

Rows of all experts lie in one tensor and so do the results: nothing is padded to the fullest
expert, nothing is concatenated. A device that has a grouped product gets one call; elsewhere it is
one product per expert, written to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Activation = Callable[..., Tensor]
"""Element-wise in tensors of one shape."""


def grouped_linear(
    rows_AC: Tensor, counts_E: Tensor, weight_ECH: Tensor, bias_EH: Tensor | None
) -> Tensor:
    """``rows @ weight[e] + bias[e]`` with the e of each row: ``[A, H]``.

    The first ``counts_E[0]`` rows belong to expert 0, and so on. Experts without rows get gradients
    of zero. Under autocast the product runs in its dtype.
    """
    kind = rows_AC.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows_AC, weight_ECH = rows_AC.to(dtype), weight_ECH.to(dtype)
    if not _has_grouped_product(rows_AC, weight_ECH):
        if bias_EH is not None:
            bias_EH = bias_EH.to(rows_AC.dtype)
        out_AH: Tensor = _Segments.apply(  # type: ignore[no-untyped-call]
            rows_AC, weight_ECH, bias_EH, counts_E.tolist()
        )
        return out_AH
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    out_AH = F.grouped_mm(rows_AC, weight_ECH, offs=ends_E)
    if bias_EH is None:
        return out_AH
    each_AH = bias_EH.to(out_AH.dtype).repeat_interleave(
        counts_E, dim=0, output_size=rows_AC.shape[0]
    )
    return out_AH + each_AH


def _has_grouped_product(rows_AC: Tensor, weight_ECH: Tensor) -> bool:
    """torch's grouped product takes bf16 rows of multiples of 16 bytes, and at least one."""
    return (
        rows_AC.is_cuda
        and rows_AC.dtype == weight_ECH.dtype == torch.bfloat16
        and rows_AC.shape[0] > 0
        and weight_ECH.shape[1] % 8 == 0
        and weight_ECH.shape[2] % 8 == 0
        and hasattr(F, "grouped_mm")
    )


def activated_linear(
    pre: Sequence[Tensor],
    activation: Activation,
    counts_E: Tensor,
    weight_EHC: Tensor,
    bias_EC: Tensor | None,
) -> Tensor:
    """:func:`grouped_linear` of ``activation(*pre)``, each ``[A, H]``.

    Without a grouped product of the device only ``pre`` is kept for backward, which computes the
    activation anew: an element-wise pass against a tensor as large as ``pre``.
    """
    if _has_grouped_product(pre[0], weight_EHC):
        return grouped_linear(activation(*pre), counts_E, weight_EHC, bias_EC)
    dtype = pre[0].dtype  # that of autocast, if it is on
    if bias_EC is not None:
        bias_EC = bias_EC.to(dtype)
    out_AC: Tensor = _ActivatedSegments.apply(  # type: ignore[no-untyped-call]
        weight_EHC.to(dtype), bias_EC, counts_E.tolist(), activation, *pre
    )
    return out_AC


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    parts = zip(rows.split(counts), weight, out.split(counts), strict=True)
    for e, (x, matrix, y) in enumerate(parts):
        if bias is None:
            torch.mm(x, matrix, out=y)
        else:
            torch.addmm(bias[e], x, matrix, out=y)
    return out


def _to_rows(grad: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return _product(grad, weight.transpose(1, 2), None, counts)


def _to_weight(grad: Tensor, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    out = torch.empty_like(weight)
    for g, x, to_matrix in zip(grad.split(counts), rows.split(counts), out, strict=True):
        torch.mm(x.t(), g, out=to_matrix)  # without rows: zeros
    return out


def _to_bias(grad: Tensor, counts: list[int]) -> Tensor:
    return torch.stack([g.sum(0) for g in grad.split(counts)])


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _product(rows, weight, bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        counts, needs = ctx.counts, ctx.needs_input_grad
        return (
            _to_rows(grad, weight, counts) if needs[0] else None,
            _to_weight(grad, rows, weight, counts) if needs[1] else None,
            _to_bias(grad, counts) if needs[2] else None,
            None,
        )


class _ActivatedSegments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        counts: list[int],
        activation: Activation,
        *pre: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight, *pre)
        ctx.counts, ctx.activation = counts, activation
        return _product(activation(*pre), weight, bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        counts, needs = ctx.counts, ctx.needs_input_grad
        pre = [tensor.detach().requires_grad_() for tensor in saved]
        with torch.enable_grad():
            rows = ctx.activation(*pre)
        to_weight = _to_weight(grad, rows.detach(), weight, counts) if needs[0] else None
        to_bias = _to_bias(grad, counts) if needs[1] else None
        to_pre: tuple[Tensor | None, ...] = (None,) * len(pre)
        if any(needs[4:]):
            to_pre = torch.autograd.grad(rows, pre, _to_rows(grad, weight, counts))
        return to_weight, to_bias, None, None, *to_pre
