"""Memory that is given up for a while, and where its bytes lie meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.config import Config
from zeroexp.ops.pages import release_pages
from zeroexp.tiers import Border, FileEngine, Ring, ScratchFolder, SwapFile, Traffic


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
    """A swap file in a folder of its own below ``offload.nvme.dir``, one record for each memory.

    Raises FileError (a full disk, before anything is written) or ConfigError, and then leaves
    nothing behind.
    """

    def __init__(self, kept: Sequence[Memory], border: Border, config: Config, rank: int) -> None:
        nvme = config.offload.nvme
        assert nvme.dir is not None
        self._border = border
        self._records = {id(memory): number for number, memory in enumerate(kept)}
        with ExitStack() as stack:
            folder = stack.enter_context(ScratchFolder(Path(nvme.dir), f"rank{rank}-parked"))
            engine = stack.enter_context(
                FileEngine(
                    nvme.engine,
                    queue_depth=nvme.queue_depth,
                    block_size=nvme.block_size,
                    threads=nvme.threads,
                )
            )
            self._file = SwapFile(
                engine,
                folder.path / "parked.swap",
                [memory.num_bytes for memory in kept],
                Ring(1, 1),  # records go from memory to the file and back, and through no slot
                Traffic(),
                checksum=nvme.checksum,
            )
            for memory in kept:
                here = border.down(memory.bytes).wait()
                self._file.store(self._records[id(memory)], here).wait()
            self._end = stack.pop_all()

    def bring(self, memory: Memory) -> None:
        record, target = self._records[id(memory)], memory.bytes
        if target.device.type == "cpu":
            self._file.load(record, target).wait()
            return
        here = self._border.host_like(target)
        self._file.load(record, here).wait()
        target.copy_(here)

    def close(self) -> None:
        self._end.close()
