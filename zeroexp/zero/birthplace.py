"""Where the shards of a model under construction are kept until an engine takes them over."""

from __future__ import annotations

from pathlib import Path

import torch

from zeroexp.comm.pool import BufferPool, flat_zeros
from zeroexp.config import Config
from zeroexp.ledger import Ledger
from zeroexp.placement import Tier
from zeroexp.tiers import FileEngine, Ring, ScratchFolder, SwapFile, Traffic
from zeroexp.zero.home import DiskHome, Home, MemoryHome, Outgoing


class Birthplace:
    """On disk where ``config`` (resolved) has the parameters there, else in memory: what does not
    fit while it trains does not fit while it is built. Raises :class:`ConfigError` for a folder
    that cannot be used, :class:`FileError` when the disk is full."""

    def __init__(self, config: Config, rank: int) -> None:
        self._folder: ScratchFolder | None = None
        if Tier(config.offload.params_tier) is not Tier.NVME:
            return
        nvme = config.offload.nvme
        assert nvme.dir is not None
        self._folder = ScratchFolder(Path(nvme.dir), f"birth-rank{rank}")
        self._engine = FileEngine(
            nvme.engine,
            queue_depth=nvme.queue_depth,
            block_size=nvme.block_size,
            threads=nvme.threads,
        )
        self._checksum = nvme.checksum
        self._ring = Ring(1, 4096)  # no record is opened: all come to memory of the pool
        self._traffic = Traffic()
        self._pool = BufferPool(torch.device("cpu"), Ledger(), "visitors from disk", Tier.CPU)
        self._outgoing = Outgoing()
        self._files: dict[Home, SwapFile] = {}
        self._num_files = 0

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> Home:
        """A place for ``numel`` values, zero at first."""
        if self._folder is None:
            return MemoryHome(flat_zeros(numel, dtype, device))
        path = self._folder.path / f"{self._num_files}.swap"
        self._num_files += 1
        file = SwapFile(
            self._engine,
            path,
            [numel * dtype.itemsize],
            self._ring,
            self._traffic,
            checksum=self._checksum,
        )
        home = DiskHome(file, 0, numel, dtype, self._pool, self._outgoing)
        self._files[home] = file
        return home

    def free(self, home: Home) -> None:
        """Its values are somewhere else by now, and the engine needs the space on disk."""
        if self._folder is not None and home in self._files:
            home.put_back()
            file = self._files.pop(home)
            file.close()
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nobody asks for any of it again."""
        if self._folder is None:
            return
        try:
            for home in list(self._files):
                self.free(home)
            self._engine.close()
        finally:
            self._folder.close()
