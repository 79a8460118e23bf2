"""Host memory with an address of its own: pages can go and come again, the address stays."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from zeroexp.ops.native import native

if TYPE_CHECKING:
    from zeroexp import _C

    _Memory: TypeAlias = "_C.HostRange | _PythonRange"


class HostRange:
    """A private, zero-filled range of ``num_bytes`` bytes, on huge pages where the kernel has them.

    A released unit keeps its buffer's identity this way: views of it stay valid (they read zeros
    until it is filled again), and no other unit can get its memory. Filling fresh pages is five
    times faster on huge pages than on small ones. Raises MemoryError when the address space is
    exhausted, ValueError for a negative size.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ValueError(f"HostRange: num_bytes is {num_bytes}")
        self.num_bytes = num_bytes
        host_range = native().host_range
        self._memory: _Memory | None = (
            _PythonRange(num_bytes) if host_range is None else host_range(num_bytes)
        )

    @property
    def huge_pages(self) -> bool:
        """Whether the kernel accepted huge pages for the range (it never does below 2 MiB)."""
        return self._open().huge_pages

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of the range now in memory, in whole pages; None where that cannot be told."""
        return self._open().resident_bytes

    def tensor(self, dtype: torch.dtype, count: int | None = None, offset: int = 0) -> Tensor:
        """A flat tensor over ``count`` elements (default: what fits) from byte ``offset`` on.

        The tensor keeps the addresses alive, also past :meth:`close`. Raises ValueError when it
        does not fit.
        """
        room = (self.num_bytes - offset) // dtype.itemsize
        count = room if count is None else count
        if offset < 0 or offset % dtype.itemsize or not 0 <= count <= room:
            raise ValueError(
                f"HostRange: {count} x {dtype} at byte {offset} does not fit in "
                f"{self.num_bytes} bytes"
            )
        memory = self._open()
        if count == 0:  # torch.frombuffer refuses empty buffers
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)

    def release(self) -> None:
        """Gives the pages back to the system; the addresses stay valid and read as zeros."""
        self._open().release()

    def take_pages(self, source: HostRange) -> None:
        """Moves the pages of ``source`` here, as far as both reach, and leaves it released.

        What is in them comes along, so the contents are undefined until this range is filled. The
        system moves page tables: several times faster than fresh pages, which it fills with zeros.
        """
        mine, other = self._open(), source._open()
        if isinstance(mine, _PythonRange) or isinstance(other, _PythonRange):
            if mine is not other:
                other.release()
        else:
            mine.take_pages(other)

    def close(self) -> None:
        """Gives the pages back; the addresses go when the last tensor over them goes."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    def _open(self) -> _Memory:
        if self._memory is None:
            raise ValueError("HostRange: it is closed")
        return self._memory


def host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of ``size`` zeros in a :class:`HostRange` of its own, which goes with it.

    Streaming ops run a tenth to a fifth faster over huge pages than over what the allocator gives:
    long-lived flat state (shards, moments) belongs here.
    """
    return HostRange(size * dtype.itemsize).tensor(dtype)


class _PythonRange(mmap.mmap):
    """The range without compiled ops: no alignment to huge pages, otherwise the same."""

    huge_pages = False
    resident_bytes = None

    def __new__(cls, num_bytes: int) -> _PythonRange:
        memory = super().__new__(
            cls, -1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 2 << 20:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.huge_pages = True
        return memory

    def release(self) -> None:
        self.madvise(mmap.MADV_DONTNEED)
