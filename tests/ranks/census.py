"""Independent counts: storages that are really alive, bytes that really leave a process.

Nothing here asks zeroexp: storages are found by walking all live Python objects, calls by wrapping
torch.distributed, wire bytes by the kernel's count of what this process has written.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

SMALL = 256
"""Messages of up to this many bytes are flags, norms and headers, not state or gradients."""


def _resident(address: int, nbytes: int) -> bool:
    """Whether any page of the range is in memory (a range given back by ``madvise`` is not)."""
    page = mmap.PAGESIZE
    start = address // page * page
    pages = (address + nbytes - start + page - 1) // page
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), vector) != 0:
        return True
    return any(entry & 1 for entry in vector)


def _tensors() -> Iterator[Tensor]:
    for found in gc.get_objects():
        try:
            # type() and not isinstance(): asking lazy proxies for their class may import things.
            if issubclass(type(found), Tensor):
                yield found
        except ReferenceError:
            continue


def live_storages() -> dict[int, int]:
    """Address to bytes of every storage in memory that some Python object can reach."""
    gc.collect()
    out: dict[int, int] = {}
    for tensor in _tensors():
        candidates = [tensor]
        if tensor.is_leaf and tensor.grad is not None:
            candidates.append(tensor.grad)
        for each in candidates:
            storage = each.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
            if nbytes and address and _resident(address, nbytes):
                out[address] = max(nbytes, out.get(address, 0))
    return out


def bytes_since(before: dict[int, int], *, ignore: tuple[Tensor, ...] = ()) -> int:
    """Bytes of the storages alive now that were not in ``before``, scalars left out.

    A scalar has at most 8 bytes (step counts, the one NaN behind released parameters).
    """
    known = set(before) | {t.untyped_storage().data_ptr() for t in ignore}
    return sum(n for address, n in live_storages().items() if address not in known and n > 8)


def wire_bytes() -> int:
    """Bytes this process has written so far (sockets included), as the kernel counts them."""
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["wchar"])


def _nbytes(*tensors: Any) -> int:
    total = 0
    for each in tensors:
        if isinstance(each, Tensor):
            total += each.numel() * each.element_size()
        elif isinstance(each, list | tuple):
            total += _nbytes(*each)
    return total


def _sent(name: str, arguments: dict[str, Any], size: int) -> int:
    """Bytes that one call makes this rank send, by the definition (N-1)/N of the whole tensor."""
    get = arguments.get
    if name in ("isend", "send"):
        return _nbytes(get("tensor"))
    if name in ("all_gather", "all_gather_single", "all_gather_into_tensor"):
        mine = get("tensor", get("input_tensor", get("input")))
        return (size - 1) * _nbytes(mine)
    if name in ("all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_single"):
        whole = get("input", get("input_tensor_list", get("input_list")))
        return _nbytes(whole) * (size - 1) // size
    if name == "reduce_scatter_tensor":
        return _nbytes(get("input")) * (size - 1) // size
    if name == "all_reduce":
        return 2 * _nbytes(get("tensor")) * (size - 1) // size
    if name in ("broadcast", "reduce", "gather", "scatter"):
        raise AssertionError(f"{name}: no formula for this call inside a training step")
    return 0


COUNTED = (
    "isend",
    "send",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)


class Traffic:
    """What torch.distributed was asked to send: ``sent`` bytes by call, ``calls``, ``control``."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.control = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


@contextmanager
def counted_calls() -> Iterator[Traffic]:
    """Count all sending calls of torch.distributed while the block runs."""
    import inspect

    traffic = Traffic()
    originals: list[tuple[Any, str, Callable[..., Any]]] = []
    inside: list[str] = []  # a call may be made of others; only the outermost counts

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(call)

        def counting(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return call(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            size = dist.get_world_size(arguments.get("group"))
            nbytes = _sent(name, arguments, size)
            if nbytes <= SMALL:
                traffic.control += nbytes
            else:
                traffic.sent[name] += nbytes
                traffic.calls[name] += 1
            inside.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                inside.pop()

        return counting

    for module in (dist, dist.distributed_c10d):
        for name in COUNTED:
            call = getattr(module, name, None)
            if call is not None:
                originals.append((module, name, call))
                setattr(module, name, wrap(name, call))
    try:
        yield traffic
    finally:
        for module, name, call in originals:
            setattr(module, name, call)
