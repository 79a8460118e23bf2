"""One matrix product per expert over rows that are sorted by expert.

Rows of all experts lie in one tensor and so do the results: nothing is padded to the fullest
expert, nothing is concatenated. A device that has a grouped product gets one call; elsewhere it is
one product per expert, written to its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        parts = zip(rows.split(counts), weight, out.split(counts), strict=True)
        for e, (x, matrix, y) in enumerate(parts):
            if bias is None:
                torch.mm(x, matrix, out=y)
            else:
                torch.addmm(bias[e], x, matrix, out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grads = grad.split(ctx.counts)
        to_rows = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_rows = torch.empty_like(rows)
            for g, matrix, out in zip(grads, weight, to_rows.split(ctx.counts), strict=True):
                torch.mm(g, matrix.t(), out=out)
        if ctx.needs_input_grad[1]:
            to_weight = torch.empty_like(weight)
            for g, x, out in zip(grads, rows.split(ctx.counts), to_weight, strict=True):
                torch.mm(x.t(), g, out=out)  # without rows: zeros
        if ctx.needs_input_grad[2]:
            to_bias = torch.stack([g.sum(0) for g in grads])
        return to_rows, to_weight, to_bias, None
