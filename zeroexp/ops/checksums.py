"""A 64-bit sum over a buffer, to find bytes that changed on their way to a disk and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from zeroexp.ops.native import native

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# Lanes that the reference takes at a time: bounds its extra memory to a few times 8 MiB.
_BLOCK = 1 << 20


def checksum(t: Tensor, *, seed: int = 0) -> int:
    """The sum of the bytes of ``t``, between 0 and 2**64 - 1.

    ``t``: a contiguous CPU tensor of any dtype and shape; only its bytes count. ``seed``: 0 to
    2**64 - 1; another seed gives another sum, so that a block found in the wrong place does not
    pass. A change within 8 aligned bytes always changes the sum, any other change (also of order
    or length) does but for one case in about 2**64. It finds corruption; it is not cryptographic.
    Defined in csrc/io/checksum.hpp: the mixing is SplitMix64's (Steele, Lea and Flood, OOPSLA
    2014). Raises TypeError and ValueError.
    """
    if t.device.type != "cpu" or t.layout != torch.strided:
        raise TypeError(f"checksum: t is {t.layout} on {t.device}, expected a dense CPU tensor")
    if not t.is_contiguous():
        raise ValueError(f"checksum: t of shape {tuple(t.shape)} is not contiguous")
    if not 0 <= seed <= _MASK:
        raise ValueError(f"checksum: seed is {seed}, expected 0 to 2**64 - 1")
    compiled = native().checksum
    if compiled is None:
        return _reference(t, seed)
    return compiled(address=t.data_ptr(), num_bytes=t.numel() * t.element_size(), seed=seed)


def _reference(t: Tensor, seed: int) -> int:
    # Zero-dimensional tensors have no byte view of their own.
    data = t.detach().reshape(-1).view(torch.uint8).numpy()
    total = _mixed(np.array([len(data)], np.uint64), np.array([seed], np.uint64))
    for first in range(0, -(-len(data) // 8), _BLOCK):
        part = data[first * 8 : (first + _BLOCK) * 8]
        lanes = np.zeros(-(-len(part) // 8), "<u8")
        lanes.view(np.uint8)[: len(part)] = part
        keys = np.arange(first + 1, first + 1 + len(lanes), dtype=np.uint64)
        keys = keys * np.uint64(_STEP) + np.uint64(seed)
        total += _mixed(lanes.astype(np.uint64), keys)
    return total & _MASK


def _mixed(lanes: np.ndarray, keys: np.ndarray) -> int:
    """The sum of the mixed lanes modulo 2**64; products of arrays wrap silently."""
    x = lanes ^ keys
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
