"""Where the parameters of one segment are while nobody uses them, when that is not the buffer they
are used in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from zeroexp.comm.pool import BufferPool
from zeroexp.tiers import SwapFile


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None: ...


class Home(ABC):
    """Flat values ``[numel]`` of this rank: its slice where parameters are sharded, else all."""

    resident: Tensor | None = None
    """The values, if they stay in memory."""

    def prefetch(self) -> None:  # noqa: B027 (what is in memory is near)
        """Start to bring the values near; :meth:`fetch` will follow."""

    @abstractmethod
    def fetch(self) -> Tensor:
        """The values in memory, not to be changed, until :meth:`put_back`."""

    def put_back(self) -> None:  # noqa: B027
        """Nobody reads what :meth:`fetch` gave any more."""

    @abstractmethod
    def take(self) -> Tensor:
        """A tensor for new values; :meth:`keep` makes them the home's."""

    @abstractmethod
    def keep(self) -> None:
        """What is in the tensor of :meth:`take` (or :meth:`fetch`) is what the home holds now."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Replace all values."""

    @abstractmethod
    def updating(self, *, keeps: bool) -> AbstractContextManager[Tensor]:
        """A context with a tensor to write new values into; ``keeps``: it holds the old ones, for
        an update of a part."""


class MemoryHome(Home):
    """Values that stay in memory."""

    resident: Tensor
    refuse: Callable[[], None] | None = None
    """Raises, while the values are away."""

    def __init__(self, values: Tensor) -> None:
        self.resident = values

    def fetch(self) -> Tensor:
        if self.refuse is not None:
            self.refuse()
        return self.resident

    def take(self) -> Tensor:
        return self.resident

    def keep(self) -> None:
        pass

    def write(self, values: Tensor) -> None:
        self.resident.copy_(values)

    @contextmanager
    def updating(self, *, keeps: bool) -> Iterator[Tensor]:
        yield self.resident


class Outgoing:
    """Values on their way to disk: a few at a time, so that few buffers are taken by them."""

    _MOST = 2

    def __init__(self) -> None:
        self._homes: list[DiskHome] = []

    def add(self, home: DiskHome) -> None:
        self._homes.append(home)
        while len(self._homes) > self._MOST:
            self._homes.pop(0).land()


class DiskHome(Home):
    """Values in one record of a file; they visit memory in a buffer of ``pool``, which they leave
    when they are back on disk."""

    def __init__(
        self,
        file: SwapFile,
        record: int,
        numel: int,
        dtype: torch.dtype,
        pool: BufferPool,
        outgoing: Outgoing,
    ) -> None:
        self._file = file
        self._record = record
        self._numel = numel
        self._dtype = dtype
        self._pool = pool
        self._outgoing = outgoing
        self._going: Transfer | None = None
        self._raw: Tensor | None = None
        self._coming: Transfer | None = None

    def take(self) -> Tensor:
        self.put_back()
        return self._take()

    def _take(self) -> Tensor:
        self._raw = self._pool.take(self._numel, self._dtype)
        return self._visitor

    @property
    def _visitor(self) -> Tensor:
        assert self._raw is not None
        return self._raw.view(self._dtype)[: self._numel]

    def prefetch(self) -> None:
        if self._going is not None:
            self.put_back()
        if self._raw is None:
            self._coming = self._file.load(self._record, self._take())

    def fetch(self) -> Tensor:
        self.prefetch()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.wait()
        return self._visitor

    def put_back(self) -> None:
        # A buffer that the disk still reads or fills must not go to anybody else.
        for transfer in (self._coming, self._going):
            if transfer is not None:
                transfer.wait()
        self._coming = self._going = None
        if self._raw is not None:
            self._pool.give(self._raw)
            self._raw = None

    def keep(self) -> None:
        self._going = self._file.store(self._record, self._visitor)
        self._outgoing.add(self)

    def land(self) -> None:
        """Leave memory, unless it has been asked for again since :meth:`keep`."""
        if self._going is not None:
            self.put_back()

    def write(self, values: Tensor) -> None:
        self.put_back()
        self._file.store(self._record, values.cpu().contiguous()).wait()

    @contextmanager
    def updating(self, *, keeps: bool) -> Iterator[Tensor]:
        values = self.fetch() if keeps else self.take()
        try:
            yield values
        except BaseException:
            self.put_back()
            raise
        self.keep()
