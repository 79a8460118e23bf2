"""Memory that the C allocator keeps after it was freed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc alone has it
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def return_freed_memory() -> None:
    """Give pages of freed blocks back to the system; does nothing where the allocator cannot.

    Once a large block was freed, glibc serves blocks of that size from its heap and keeps what is
    freed there. Whoever gives up a model's worth of small tensors calls this, or the process stays
    as large as the model.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
