"""Memory that is given up for a while, and where its bytes lie meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.config import Config
from zeroexp.errors import SwapError
from zeroexp.ops import checksum
from zeroexp.ops.pages import release_pages
from zeroexp.tiers import Border, File, FileEngine, ScratchFolder
from zeroexp.tiers.ring import whole_blocks


class Memory:
    """The storage of ``tensor``, which can be freed and filled again in place: all tensors over it
    stay what they are. ``counts``: whether its bytes must be kept; else it comes back as zeros."""

    def __init__(self, tensor: Tensor, *, counts: bool = True) -> None:
        self._storage = tensor.untyped_storage()
        self.device = tensor.device
        self.counts = counts
        self.num_bytes = self._storage.nbytes()
        # Pinned pages are the driver's, and stay until the allocator gives them up.
        self._in_pages = tensor.device.type == "cpu" and not tensor.is_pinned()

    @property
    def bytes(self) -> Tensor:
        """All of it, as uint8 ``[num_bytes]``."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)

    def free(self) -> None:
        """Give the memory up."""
        if self._in_pages:
            release_pages(self.bytes)
        else:
            self._storage.resize_(0)

    def acquire(self) -> None:
        """Have the memory again: zeros where nothing counts, else undefined."""
        if self._storage.nbytes() != self.num_bytes:
            self._storage.resize_(self.num_bytes)
        if not self.counts:
            self.bytes.zero_()


def memories(tensors: Iterable[Tensor], *, counts: bool = True) -> list[Memory]:
    """The storages of ``tensors``, each once."""
    found: dict[int, Memory] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), Memory(tensor, counts=counts))
    return list(found.values())


class Shelf(ABC):
    """Holds the bytes of the memories it was made with; nothing of them is freed by it."""

    @abstractmethod
    def bring(self, memory: Memory) -> None:
        """Write the bytes of ``memory`` back into it. Raises FileError or SwapError, and then
        still holds them."""

    @abstractmethod
    def close(self) -> None:
        """Nobody wants the bytes any more."""


class HostShelf(Shelf):
    """Pinned host memory, for what is on an accelerator."""

    def __init__(self, kept: Sequence[Memory], border: Border) -> None:
        crossings = [(id(memory), border.down(memory.bytes)) for memory in kept]
        self._copies = {key: crossing.wait() for key, crossing in crossings}

    def bring(self, memory: Memory) -> None:
        memory.bytes.copy_(self._copies[id(memory)])

    def close(self) -> None:
        self._copies = {}


class FileShelf(Shelf):
    """A file in a folder of its own below ``offload.nvme.dir``, written whole when this is made.
    Between then and the first :meth:`bring` it takes no memory and no thread.

    Raises FileError (a full disk, before anything is written) or ConfigError, and then leaves
    nothing behind.
    """

    def __init__(self, kept: Sequence[Memory], border: Border, config: Config, rank: int) -> None:
        self._nvme = config.offload.nvme
        self._border = border
        assert self._nvme.dir is not None
        sizes = [whole_blocks(memory.num_bytes) for memory in kept]
        self._offsets = dict(zip(map(id, kept), accumulate(sizes, initial=0), strict=False))
        self._sums: dict[int, int] = {}
        with ExitStack() as stack:
            folder = ScratchFolder(Path(self._nvme.dir), f"rank{rank}-parked")
            self._path = stack.enter_context(folder).path / "state.parked"
            with self._engine() as engine:
                file = engine.create(self._path, sum(sizes))
                for memory in kept:
                    here = border.down(memory.bytes).wait()
                    if self._nvme.checksum:
                        self._sums[id(memory)] = checksum(here, seed=self._offsets[id(memory)])
                    file.write(here, self._offsets[id(memory)])
            self._end = stack.pop_all()
        self._file: File | None = None

    def _engine(self) -> FileEngine:
        nvme = self._nvme
        return FileEngine(
            nvme.engine,
            queue_depth=nvme.queue_depth,
            block_size=nvme.block_size,
            threads=nvme.threads,
        )

    def bring(self, memory: Memory) -> None:
        if self._file is None:
            self._file = self._end.enter_context(self._engine()).open(self._path)
        target = memory.bytes
        here = target if target.device.type == "cpu" else self._border.host_like(target)
        self._file.read(here, self._offsets[id(memory)])
        self._verify(memory, here)
        if here is not target:
            target.copy_(here)

    def _verify(self, memory: Memory, here: Tensor) -> None:
        if not self._sums:
            return
        first = self._offsets[id(memory)]
        expected, found = self._sums[id(memory)], checksum(here, seed=first)
        if found == expected:
            return
        raise SwapError(
            f"bytes {first} to {first + memory.num_bytes} of {self._path} are not what "
            f"offload_states() wrote there: their checksum is {found:016x}, expected "
            f"{expected:016x}. Nothing of them is used. Let nothing else write there, look at the "
            "disk (dmesg), and resume from a checkpoint",
            path=str(self._path),
            offset=first,
            num_bytes=memory.num_bytes,
            expected=expected,
            found=found,
        )

    def close(self) -> None:
        self._file = None
        self._end.close()
