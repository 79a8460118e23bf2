"""A flat tensor scaled and cast to another dtype, with the squares of a norm in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.ops.checks import FLOAT_TYPES, TYPE_NAMES, check_apart, check_flat
from zeroexp.ops.native import native
from zeroexp.ops.sums import sum_squares

# Elements that the reference widens at a time: bounds its extra memory to 4 MiB.
_BLOCK = 1 << 20


def scale_cast(out: Tensor, part: Tensor, scale: float) -> float:
    """``out = part * scale`` in one pass; returns ``sum_squares(out)``, the same bits.

    ``part`` and ``out``: fp32, bf16 or fp16. Elements are widened, multiplied by ``scale`` (rounded
    to fp32) in fp32, and rounded to nearest even. The sum is accumulated in fp64 over what was
    written; it is inf or NaN exactly when an element of ``out`` is not finite. Both are dense
    contiguous CPU tensors with the same number of elements; ``out`` may be ``part`` itself, but may
    not overlap it otherwise. Threads and instruction set change no bit. Autograd does not see the
    writes. Raises TypeError and ValueError that name the argument.
    """
    size = out.numel()
    check_flat("scale_cast", "out", out, FLOAT_TYPES)
    check_flat("scale_cast", "part", part, FLOAT_TYPES, size)
    if out.data_ptr() != part.data_ptr() or out.dtype != part.dtype:
        check_apart("scale_cast", {"out": out, "part": part})
    kernels = native().kernels
    if kernels is None:
        return _reference(out, part, scale)
    return kernels.scale_cast(
        out=out.data_ptr(),
        part=part.data_ptr(),
        scale=scale,
        size=size,
        part_type=TYPE_NAMES[part.dtype],
        out_type=TYPE_NAMES[out.dtype],
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def _reference(out: Tensor, part: Tensor, scale: float) -> float:
    to, source = out.view(-1), part.view(-1)
    for start in range(0, to.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        to[block].copy_(source[block].float() * scale)
    return sum_squares(out)
