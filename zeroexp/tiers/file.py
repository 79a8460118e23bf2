"""Files that host memory is written to and read from in the background."""

from __future__ import annotations

import errno
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from zeroexp.errors import FileError
from zeroexp.tiers.backend import Backend, Outcome, make_backend

MIB = 1 << 20

_FIXES = {
    errno.ENOSPC: "free space there, or use a directory on another file system",
    errno.EDQUOT: "the quota is used up: free space there, or use another file system",
    errno.EFBIG: "files may not become that large: raise the limit (ulimit -f)",
    errno.EACCES: "use a directory that this user may write to",
    errno.EROFS: "use a directory on a file system that is not read-only",
    errno.ENODATA: "the file was cut, or never written that far",
}


@dataclass(frozen=True)
class EngineStatus:
    """How an engine works.

    ``engine`` is ``io_uring`` or ``threads``, ``compiled`` tells C++ from Python, ``reason`` is one
    line for a person. ``queue_depth`` and ``block_size`` (bytes) count for io_uring, ``threads``
    and ``block_size`` for threads. ``buffered`` has one line for each directory whose files go
    through the page cache, with the reason: empty while all transfers are direct.
    """

    engine: str
    compiled: bool
    reason: str
    queue_depth: int
    block_size: int
    threads: int
    buffered: tuple[str, ...]


class FileEngine:
    """Reads and writes of host memory at offsets of files, asynchronous.

    ``engine``: ``io_uring`` keeps up to ``queue_depth`` blocks with the kernel from one thread of
    its own; ``threads`` runs ``threads`` threads with pread and pwrite; ``auto`` takes io_uring
    where the kernel allows it. ``block_size``: bytes of one transfer, a multiple of 4096. Without
    compiled ops ``threads`` is done in Python, through the page cache.

    What it guarantees:

    * **Bytes.** Sizes, offsets and addresses are free. Whole aligned blocks go past the page cache
      (O_DIRECT) where the file system has that; the odd bytes at both ends go through it, and so
      does everything elsewhere: :meth:`status` says so. Memory from :class:`zeroexp.ops.HostRange`
      is fastest; memory that is not aligned for the device is copied through aligned blocks.
      A transfer is whole or an error: short ones are continued, interrupted ones tried again.
    * **Errors.** A full disk, a size limit or a file that ends early is a :class:`FileError` from
      ``wait`` (or ``flush``) of that request, with path, offset, bytes wanted, done and free. What
      the request did not reach is undefined; other requests go on.
    * **Order.** There is none between requests that are open: wait for a write before what it wrote
      is read, or written again.
    * **Lifetime.** The engine keeps memory and file of a request until it was waited for; change
      nothing in a buffer that is read or written meanwhile. Autograd does not see the transfers.
    * **Threads and processes.** Any thread may call, one at a time waits for a given transfer. The
      GIL is free meanwhile; Ctrl-C ends the wait (not the transfer). In a fork of its process an
      engine refuses to work; do not fork while a read is open (open(2), O_DIRECT: older kernels may
      give the bytes to the wrong process).
    * **Durability.** What was waited for is in the file and outlives the process; it outlives a
      power cut after :meth:`File.sync`.

    Raises ValueError for arguments that make no sense, ZeroexpError where ``io_uring`` is asked for
    by name and refused.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        queue_depth: int = 4,
        block_size: int = 8 * MIB,
        threads: int = 4,
    ) -> None:
        self._backend = make_backend(engine, queue_depth, block_size, threads)
        self._settings = (queue_depth, block_size, threads)
        self._process = os.getpid()
        self._open_files: dict[int, File] = {}
        self._open: dict[int, Transfer] = {}
        self._buffers: dict[int, Tensor] = {}
        self._buffered: dict[str, None] = {}
        # The memory may go only after the threads that write to it: also when nobody calls close.
        self._end = weakref.finalize(self, _shut_down, self._backend, self._buffers)

    def status(self) -> EngineStatus:
        """How this engine works now."""
        for file in self._open_files.values():
            self._note(file)
        queue_depth, block_size, threads = self._settings
        return EngineStatus(
            engine=self._backend.kind,
            compiled=type(self._backend).__module__ == "zeroexp._C",
            reason=self._backend.reason,
            queue_depth=queue_depth,
            block_size=block_size,
            threads=threads,
            buffered=tuple(self._buffered),
        )

    def create(self, path: str | os.PathLike[str], num_bytes: int) -> File:
        """A new file of ``num_bytes`` zeros at ``path``, its blocks allocated, to read and write.

        What is at ``path`` is replaced. Raises FileError, and then leaves nothing behind.
        """
        if num_bytes < 0:
            raise ValueError(f"FileEngine.create: num_bytes is {num_bytes}")
        return self._file(path, "create", num_bytes)

    def open(self, path: str | os.PathLike[str], *, writable: bool = False) -> File:
        """The file at ``path`` as it is. Raises FileError."""
        return self._file(path, "write" if writable else "read", 0)

    def flush(self) -> None:
        """Waits for every open request; then raises the FileError of the first that failed."""
        first: FileError | None = None
        for transfer in list(self._open.values()):
            try:
                transfer.wait()
            except FileError as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Waits for every open request, closes all files, ends the threads. Raises as flush."""
        if not self._end.alive or os.getpid() != self._process:
            return
        try:
            self.flush()
        finally:
            for file in list(self._open_files.values()):
                file.close()
            self._end()

    def __enter__(self) -> FileEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _file(self, path: str | os.PathLike[str], access: str, num_bytes: int) -> File:
        self._check_open()
        where = os.fspath(path)
        number, outcome = self._backend.open(where, access, num_bytes)
        if outcome.error:
            what = f"create {where} with {num_bytes} bytes" if access == "create" else where
            raise _failed(f"cannot {'' if access == 'create' else 'open '}{what}", where, outcome)
        file = File(self, number, Path(where))
        self._open_files[number] = file
        self._note(file)
        return file

    def _note(self, file: File) -> None:
        facts = self._backend.facts(file._number)
        if not facts.direct:
            self._buffered[f"{file.path.parent}: {facts.why_buffered}"] = None

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("FileEngine: it is closed")
        if os.getpid() != self._process:
            raise ValueError(
                "FileEngine: it was made before this process was forked, and its threads stayed "
                "there; make one here"
            )


class File:
    """An open file of a :class:`FileEngine`, which makes it; :meth:`close` or ``with`` ends it."""

    def __init__(self, engine: FileEngine, number: int, path: Path) -> None:
        self._engine = engine
        self._number = number
        self.path = path

    @property
    def num_bytes(self) -> int:
        """Bytes of the file now."""
        self._check_open()
        return self._engine._backend.facts(self._number).size

    @property
    def direct(self) -> bool:
        """Whether whole blocks go past the page cache."""
        self._check_open()
        return self._engine._backend.facts(self._number).direct

    def submit_read(self, buffer: Tensor, offset: int = 0) -> Transfer:
        """Starts to fill ``buffer`` from byte ``offset`` of the file on; see :class:`Transfer`.

        ``buffer``: a contiguous CPU tensor of any dtype and shape. Raises TypeError and ValueError
        for a buffer or offset that does not do.
        """
        return self._submit("read", buffer, offset)

    def submit_write(self, buffer: Tensor, offset: int = 0) -> Transfer:
        """Starts to write the bytes of ``buffer`` from byte ``offset`` on, as submit_read."""
        return self._submit("write", buffer, offset)

    def read(self, buffer: Tensor, offset: int = 0) -> None:
        """submit_read and wait. Raises FileError."""
        self.submit_read(buffer, offset).wait()

    def write(self, buffer: Tensor, offset: int = 0) -> None:
        """submit_write and wait. Raises FileError."""
        self.submit_write(buffer, offset).wait()

    def sync(self) -> None:
        """What was waited for is on the medium when this returns (fdatasync). Raises FileError."""
        self._check_open()
        outcome = self._engine._backend.sync(self._number)
        if outcome.error:
            raise _failed(f"cannot sync {self.path}", str(self.path), outcome)

    def close(self) -> None:
        """Closes it; requests that are open keep the file until they end."""
        if self._engine._open_files.get(self._number) is self:
            self._engine._note(self)
            del self._engine._open_files[self._number]
            self._engine._backend.close_file(self._number)

    def __enter__(self) -> File:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._engine._check_open()
        if self._engine._open_files.get(self._number) is not self:
            raise ValueError(f"File: {self.path} is closed")

    def _submit(self, kind: str, buffer: Tensor, offset: int) -> Transfer:
        self._check_open()
        if buffer.device.type != "cpu" or buffer.layout != torch.strided:
            raise TypeError(
                f"File.{kind}: buffer is {buffer.layout} on {buffer.device}, expected a dense CPU "
                "tensor"
            )
        if not buffer.is_contiguous():
            raise ValueError(
                f"File.{kind}: buffer of shape {tuple(buffer.shape)} and strides "
                f"{buffer.stride()} is not contiguous"
            )
        if offset < 0:
            raise ValueError(f"File.{kind}: offset is {offset} bytes")
        engine = self._engine
        ticket = engine._backend.submit(
            file=self._number,
            write=kind == "write",
            address=buffer.data_ptr(),
            num_bytes=buffer.numel() * buffer.element_size(),
            offset=offset,
        )
        transfer = Transfer(engine, ticket, f"{kind} of {{wanted}} bytes at byte {offset}", self)
        engine._buffers[ticket] = buffer
        engine._open[ticket] = transfer
        return transfer


class Transfer:
    """A request on its way. Its buffer belongs to it until :meth:`wait` has returned or raised."""

    def __init__(self, engine: FileEngine, ticket: int, what: str, file: File) -> None:
        self._engine = engine
        self._ticket = ticket
        self._what = what
        self._path = str(file.path)
        self._over = False
        self._error: FileError | None = None
        self._ended = 0.0

    @property
    def ended(self) -> float:
        """When it was over (seconds of time.monotonic()); 0 until it was waited for."""
        return self._ended

    @property
    def over(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._over or self._engine._backend.over(self._ticket)

    def wait(self) -> None:
        """Returns when all bytes are transferred; raises FileError when they cannot be, each time
        it is asked."""
        if not self._over:
            outcome = self._engine._backend.wait(self._ticket)
            self._over = True
            self._ended = outcome.ended
            if outcome.error:
                what = self._what.format(wanted=outcome.wanted)
                self._error = _failed(f"{what} of {self._path} failed", self._path, outcome)
            del self._engine._open[self._ticket], self._engine._buffers[self._ticket]
        if self._error is not None:
            raise self._error


def _shut_down(backend: Backend, buffers: dict[int, Tensor]) -> None:
    backend.shut_down()
    buffers.clear()


def _failed(what: str, path: str, outcome: Outcome) -> FileError:
    """One message: what, where, how far, why, and what to do."""
    code = outcome.error if outcome.error > 0 else errno.ENODATA
    why = os.strerror(code) if outcome.error > 0 else "the file ends there"
    where = f" at byte {outcome.offset}, {outcome.done} bytes done" if " failed" in what else ""
    free = f"; {outcome.free} bytes are free in its file system" if outcome.free >= 0 else ""
    fix = f"; {_FIXES[code]}" if code in _FIXES else ""
    return FileError(
        code,
        f"{what}{where}: {why} ({errno.errorcode.get(code, code)}){free}{fix}",
        path,
        offset=outcome.offset,
        wanted=outcome.wanted,
        done=outcome.done,
        free=outcome.free if outcome.free >= 0 else None,
    )
