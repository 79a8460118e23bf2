"""MLPs of several experts over rows that are sorted by expert.

Rows of all experts lie in one tensor and so do the results: nothing is padded to the fullest
expert, nothing is concatenated. A device that has a grouped product gets one call a layer;
elsewhere one expert follows the other through all its layers, forward and backward, so that what is
between them stays in the cache and is as large as one expert's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroexp.moe.activations import Activation
from zeroexp.ops import host_zeros

MAPPED_BYTES = 32 << 20
"""From here on the C library maps every block anew, whatever was freed before."""


class Linear(NamedTuple):
    """``weight`` ``[E, in, out]`` and ``bias`` ``[E, out]`` of all experts."""

    weight: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Linear:
        return Linear(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


def grouped_mlp(
    rows_AC: Tensor,
    counts_E: Tensor,
    into: Sequence[Linear],
    activation: Activation,
    out: Linear,
) -> Tensor:
    """``out(activation(*(linear(rows) for linear in into)))`` with the expert of each row:
    ``[A, out]``.

    The first ``counts_E[0]`` rows belong to expert 0, and so on. Experts without rows get gradients
    of zero. Under autocast the products run in its dtype. Kept for backward are the rows and the
    inputs of the activation, which is computed anew (but where the device has a grouped product):
    an element-wise pass against a tensor as large as its input.
    """
    kind = rows_AC.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows_AC, into, out = rows_AC.to(dtype), [each.to(dtype) for each in into], out.to(dtype)
    if all(_has_grouped_product(rows_AC, each.weight) for each in (*into, out)):
        pre = [grouped_linear(rows_AC, counts_E, each) for each in into]
        return grouped_linear(activation.forward(*pre), counts_E, out)
    flat = [tensor for each in (out, *into) for tensor in each]
    out_AC: Tensor = _OneByOne.apply(  # type: ignore[no-untyped-call]
        counts_E.tolist(), activation, rows_AC, *flat
    )
    return out_AC


def grouped_linear(rows_AC: Tensor, counts_E: Tensor, linear: Linear) -> Tensor:
    """``rows @ weight[e] + bias[e]`` with the e of each row, on a device that has a grouped
    product."""
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    out_AH = F.grouped_mm(rows_AC, linear.weight, offs=ends_E)
    if linear.bias is None:
        return out_AH
    each_AH = linear.bias.to(out_AH.dtype).repeat_interleave(
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


class _OneByOne(torch.autograd.Function):
    backward_may_repeat = True  # where a pipeline splits it

    # Tensors after ``rows``: weight and bias of ``out``, then of each linear layer of ``into``.
    @staticmethod
    def forward(
        ctx: Any, counts: list[int], activation: Activation, rows: Tensor, *linears: Tensor | None
    ) -> Tensor:
        weights = [weight for weight in linears[::2] if weight is not None]
        down, ups = weights[0], weights[1:]
        down_bias, *up_biases = linears[1::2]
        pre = [_empty(rows, rows.shape[0], up.shape[2]) for up in ups]
        out = _empty(rows, rows.shape[0], down.shape[2])
        parts = zip(*(tensor.split(counts) for tensor in (rows, out, *pre)), strict=True)
        for e, (x, y, *hidden) in enumerate(parts):
            for up, bias, h in zip(ups, up_biases, hidden, strict=True):
                _linear(x, up[e], None if bias is None else bias[e], h)
            bias_C = None if down_bias is None else down_bias[e]
            _linear(activation.forward(*hidden), down[e], bias_C, y)
        ctx.save_for_backward(rows, *weights, *pre)
        ctx.counts, ctx.activation = counts, activation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, activation = ctx.counts, ctx.activation
        rows, down, *rest = ctx.saved_tensors
        ups, pre = rest[: activation.inputs], rest[activation.inputs :]
        needs = ctx.needs_input_grad
        to_rows = _empty(rows, *rows.shape) if needs[2] else None
        weights = zip((down, *ups), needs[3::2], strict=True)
        to_down, *to_ups = [_empty(w, *w.shape) if need else None for w, need in weights]
        biases = zip((down, *ups), needs[4::2], strict=True)
        to_down_bias, *to_up_biases = [
            w.new_empty(w.shape[0], w.shape[2]) if need else None for w, need in biases
        ]
        deeper = needs[2] or any(needs[5:])
        parts = zip(*(tensor.split(counts) for tensor in (rows, grad, *pre)), strict=True)
        places = [None] * len(counts) if to_rows is None else to_rows.split(counts)
        for e, (x, g, *hidden) in enumerate(parts):
            _to_linear(activation.forward(*hidden), g, e, to_down, to_down_bias)
            if not deeper:
                continue
            to_hidden = torch.mm(g, down[e].t(), out=g.new_empty(g.shape[0], down.shape[1]))
            for i, each in enumerate(activation.backward(to_hidden, *hidden)):
                _to_linear(x, each, e, to_ups[i], to_up_biases[i])
                if (to_x := places[e]) is not None:
                    back = ups[i][e].t()
                    torch.addmm(to_x, each, back, beta=min(i, 1), out=to_x)
        linears = zip((to_down, *to_ups), (to_down_bias, *to_up_biases), strict=True)
        return None, None, to_rows, *(tensor for pair in linears for tensor in pair)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _to_linear(
    x: Tensor, grad: Tensor, e: int, to_weight: Tensor | None, to_bias: Tensor | None
) -> None:
    """Gradients of one expert's weight and bias; without rows: zeros."""
    if to_weight is not None:
        torch.mm(x.t(), grad, out=to_weight[e])
    if to_bias is not None:
        torch.sum(grad, 0, out=to_bias[e])


def _empty(like: Tensor, *shape: int) -> Tensor:
    """Memory of the dtype and device of ``like``; what the C library would map in small pages, each
    a fault at its first touch, comes in huge ones."""
    size = math.prod(shape)
    if like.device.type != "cpu" or size * like.element_size() < MAPPED_BYTES:
        return like.new_empty(shape)
    return host_zeros(size, like.dtype).view(shape)
