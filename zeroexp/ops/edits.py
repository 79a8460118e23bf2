"""Edits of narrow parameters on their way into the wider master copy, on flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.ops.checks import FLOAT_TYPES, TYPE_NAMES, check_apart, check_flat
from zeroexp.ops.native import native

_BLOCK = 1 << 18
"""Elements that torch compares at a time, so that the rounded copy stays in cache."""


def adopt_edits(master: Tensor, low: Tensor) -> bool:
    """``master = low`` where ``low`` is not ``master`` rounded; whether there was such an element.

    ``master``: fp32. ``low``: fp32, bf16 or fp16, widened where it is taken over. An element of
    ``low`` whose bits are those of the rounded ``master`` (to nearest even; 0 and -0 differ) leaves
    ``master`` its full width; a NaN stays NaN, its payload is open. Both are dense contiguous CPU
    tensors with the same number of elements and memory of their own; memory is written only where
    something differs. Autograd does not see the writes. Raises TypeError and ValueError that name
    the argument.
    """
    size = master.numel()
    check_flat("adopt_edits", "master", master, (torch.float32,))
    check_flat("adopt_edits", "low", low, FLOAT_TYPES, size)
    check_apart("adopt_edits", {"master": master, "low": low})
    kernels = native().kernels
    if kernels is None:
        return adopt_edits_in_torch(master.view(-1), low.view(-1))
    return kernels.adopt_edits(
        master=master.data_ptr(),
        low=low.data_ptr(),
        size=size,
        low_type=TYPE_NAMES[low.dtype],
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def adopt_edits_in_torch(master: Tensor, low: Tensor) -> bool:
    """The same in torch's operations, on any device, for floats of 16 bits or more; both ``[n]``.
    On an accelerator it waits for the answer."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[low.element_size()]
    changed = False
    for start in range(0, master.numel(), _BLOCK):
        wide, narrow = master[start : start + _BLOCK], low[start : start + _BLOCK]
        rounded = wide.to(narrow.dtype)
        if not torch.equal(rounded.view(word), narrow.view(word)):
            same = rounded.view(word) == narrow.view(word)
            wide.copy_(torch.where(same, wide, narrow.to(wide.dtype)))
            changed = True
    return changed
