"""Sums over flat CPU tensors: the fp64 sum of squares of a norm, the ordered sum of parts, and a
quotient that is cast and added in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroexp.ops.checks import TYPE_NAMES, check_apart, check_flat
from zeroexp.ops.native import native

# Elements that the reference widens to fp64 at a time: bounds its extra memory to 8 MiB.
_BLOCK = 1 << 20

# What may be added into an output of each dtype.
_PART_TYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
}


def sum_squares(t: Tensor) -> float:
    """The sum of ``t[i] ** 2``, accumulated in fp64.

    ``t``: fp32, bf16, fp16 or fp64, a dense contiguous CPU tensor of any shape. The order of
    additions is fixed by the number of elements alone: threads and instruction set change no bit.
    inf and NaN go through. Raises TypeError and ValueError that name the argument.
    """
    check_flat("sum_squares", "t", t, TYPE_NAMES)
    kernels = native().kernels
    if kernels is None:
        return _reference_sum_squares(t)
    return kernels.sum_squares(
        data=t.data_ptr(), size=t.numel(), type=TYPE_NAMES[t.dtype], threads=torch.get_num_threads()
    )


def sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """``out = ((parts[0] + parts[1]) + parts[2]) + ...`` element by element, in one pass.

    ``parts``: fp32, bf16 or fp16 into an fp32 ``out`` (each part is widened before it is added), or
    fp64 into fp64. All parts have one dtype and the size of ``out``; all are dense contiguous CPU
    tensors. ``out`` may be one of the parts, but may not overlap one otherwise. Raises TypeError
    and ValueError that name the argument.
    """
    if not parts:
        raise ValueError("sum_into: parts is empty")
    check_flat("sum_into", "out", out, _PART_TYPES)
    dtype = parts[0].dtype
    allowed: tuple[torch.dtype, ...] = _PART_TYPES[out.dtype]
    if dtype in allowed:
        allowed = (dtype,)  # the other parts follow the first
    size = out.numel()
    start, end = out.data_ptr(), out.data_ptr() + size * out.element_size()
    for index, part in enumerate(parts):
        check_flat("sum_into", f"parts[{index}]", part, allowed, size)
        first = part.data_ptr()
        same = first == start and part.dtype == out.dtype
        if not same and first < end and start < first + size * part.element_size():
            raise ValueError(f"sum_into: parts[{index}] overlaps out without being it")
    kernels = native().kernels
    if kernels is None:
        _reference_sum_into(out, parts)
        return
    kernels.sum_into(
        out=start,
        parts=[part.data_ptr() for part in parts],
        size=size,
        type=TYPE_NAMES[dtype],
        threads=torch.get_num_threads(),
    )


def divide_into(out: Tensor, part: Tensor, divisor: float, *, add: bool) -> None:
    """``out = part / divisor``, or ``out += part / divisor`` with ``add``, in one pass.

    ``out``: fp32. ``part``: fp32, bf16 or fp16, widened before it is divided by ``divisor``, which
    is rounded to fp32. Quotient and sum are each rounded once, as by torch's operations. Both are
    dense contiguous CPU tensors with the same number of elements and memory of their own. Raises
    TypeError and ValueError that name the argument.
    """
    size = out.numel()
    check_flat("divide_into", "out", out, (torch.float32,))
    check_flat("divide_into", "part", part, _PART_TYPES[torch.float32], size)
    check_apart("divide_into", {"out": out, "part": part})
    kernels = native().kernels
    if kernels is None:
        _reference_divide_into(out, part, divisor, add)
        return
    kernels.divide_into(
        out=out.data_ptr(),
        part=part.data_ptr(),
        divisor=divisor,
        size=size,
        type=TYPE_NAMES[part.dtype],
        add=add,
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def _reference_sum_squares(t: Tensor) -> float:
    total = 0.0
    flat = t.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        total += flat[start : start + _BLOCK].double().square().sum().item()
    return total


@torch.no_grad()
def _reference_sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    # A buffer of its own for the sum: out may be any of the parts.
    total = parts[0].reshape(-1).to(out.dtype, copy=True)
    for part in parts[1:]:
        total.add_(part.reshape(-1).to(out.dtype))
    out.view(-1).copy_(total)


@torch.no_grad()
def _reference_divide_into(out: Tensor, part: Tensor, divisor: float, add: bool) -> None:
    quotient = part.view(-1).float() / divisor
    flat = out.view(-1)
    if add:
        flat.add_(quotient)
    else:
        flat.copy_(quotient)
