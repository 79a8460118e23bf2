"""Bytes of this process: resident set, its peak, the tensors that are alive, and what went to and
from disks. Linux only."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def resident_bytes() -> tuple[int, int]:
    """(resident set now, its peak since the last :func:`reset_peak`) from ``/proc/self/status``."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak() -> bool:
    """Start the peak again from the present resident set; False where the kernel does not allow
    it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def disk_bytes() -> tuple[int, int] | None:
    """Bytes (read, written) that this process had the block layer move so far, by the kernel's own
    count, whatever library asked for them; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def storage_ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address ranges [begin, end) of the tensors' storages, merged where they touch or overlap, so
    that no byte counts twice."""
    ranges = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes() and storage.data_ptr():
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum(end - begin for begin, end in storage_ranges(tensors))


def _resident_in(begin: int, end: int, libc: ctypes.CDLL) -> int:
    """Bytes of [begin, end) whose pages are in memory; the first and last page count only as far as
    the range covers them."""
    first = begin - begin % PAGE
    count = -(-(end - first) // PAGE)
    present = (ctypes.c_ubyte * count)()
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * PAGE), present) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    total = sum(PAGE for page in present if page & 1)
    if present[0] & 1:
        total -= begin - first
    if present[count - 1] & 1:
        total -= first + count * PAGE - end
    return total


def live_tensor_bytes() -> int:
    """Resident bytes of the storages of every tensor that Python can reach.

    It finds what a system keeps beside parameters, gradients and optimizer state (communication
    buffers, flat copies), whatever its classes are called. Reserved ranges whose pages were given
    back count as nothing, because only resident pages count. Tensors held by C++ alone (DDP's
    buckets) are not seen; the peak resident set contains them.
    """
    gc.collect()
    found = (t for t in gc.get_objects() if issubclass(type(t), Tensor))
    seen = [t for t in found if t.layout is torch.strided]  # others have no storage of their own
    seen += [t.grad for t in seen if t.is_leaf and t.grad is not None]
    libc = ctypes.CDLL(None, use_errno=True)
    return sum(
        _resident_in(begin, end, libc) for begin, end in storage_ranges(_plain(t) for t in seen)
    )


def _plain(tensor: Tensor) -> Tensor:
    from benchmarks.peer import local_tensor

    return local_tensor(tensor.detach())
