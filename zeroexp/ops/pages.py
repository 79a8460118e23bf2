"""Pages of a tensor's memory that go back to the system, while its addresses stay."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    return madvise


def release_pages(memory: Tensor) -> int:
    """Give the whole pages in ``memory`` (contiguous, on the CPU) back to the system; returns their
    bytes, 0 where the system keeps them (locked pages).

    The tensor and all views of it stay valid. What they read is undefined until it is written
    again: zeros in the pages that went, what was there before at both ends.
    """
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    stop = (memory.data_ptr() + memory.numel() * memory.element_size()) // page * page
    if stop <= start or _madvise()(start, stop - start, mmap.MADV_DONTNEED) != 0:
        return 0
    return stop - start
