"""The file engine without compiled ops: pread and pwrite in threads of Python."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

END_OF_FILE = -1
# As in csrc/io/queue.cpp: about a second of EAGAIN in a row counts as failed.
_MAX_TRIES = 1000

_FLAGS = {
    "read": os.O_RDONLY,
    "write": os.O_RDWR,
    "create": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
}


@dataclass
class FileOutcome:
    """See :class:`zeroexp.tiers.backend.Outcome`."""

    error: int = 0
    offset: int = 0
    wanted: int = 0
    done: int = 0
    free: int = -1
    ended: float = 0.0


@dataclass(frozen=True)
class FileFacts:
    """See :class:`zeroexp.tiers.backend.Facts`."""

    size: int
    direct: bool
    why_buffered: str


class _OpenFile:
    """A descriptor that is closed when the last request over it has gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def free_bytes(self) -> int:
        with contextlib.suppress(OSError):
            stat = os.statvfs(self.fd)
            return stat.f_bavail * stat.f_frsize
        return -1

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass
class _Request:
    file: _OpenFile
    write: bool
    memory: memoryview
    offset: int
    outcome: FileOutcome
    lock: threading.Lock = field(default_factory=threading.Lock)
    pieces: list[Future[None]] = field(default_factory=list)

    def transfer(self, start: int, end: int) -> None:
        """One piece, by as many calls as it takes; nothing once another one has failed."""
        at, tries = start, 0
        while at < end and self.outcome.error == 0:
            try:
                moved = self._call(at, end)
            except BlockingIOError as error:
                tries += 1
                if tries == _MAX_TRIES:
                    self._failed(error.errno or errno.EAGAIN, at)
                    break
                time.sleep(0.001)
                continue
            except OSError as error:
                self._failed(error.errno or errno.EIO, at)
                break
            if moved == 0:
                self._failed(errno.EIO if self.write else END_OF_FILE, at)
                break
            at, tries = at + moved, 0
        with self.lock:
            self.outcome.done += at - start
            self.outcome.ended = time.monotonic()

    def _call(self, at: int, end: int) -> int:
        part = self.memory[at:end]
        if self.write:
            return os.pwrite(self.file.fd, part, self.offset + at)
        return os.preadv(self.file.fd, [part], self.offset + at)

    def _failed(self, error: int, at: int) -> None:
        free = self.file.free_bytes()
        with self.lock:
            if self.outcome.error == 0:
                self.outcome.error = error
                self.outcome.offset = self.offset + at
                self.outcome.free = free


class PythonPool:
    """What ``zeroexp._C.FileEngine`` does, through the page cache and ``threads`` Python threads.

    ``block_size``: bytes of one piece. ``reason``: why it is in use.
    """

    kind = "threads"

    def __init__(self, reason: str, *, block_size: int, threads: int) -> None:
        self.reason = reason
        self._block_size = block_size
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="zeroexp-file")
        self._files: dict[int, _OpenFile] = {}
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()

    def open(self, path: str, access: str, num_bytes: int) -> tuple[int, FileOutcome]:
        outcome = FileOutcome(wanted=num_bytes)
        try:
            file = _OpenFile(os.open(path, _FLAGS[access] | os.O_CLOEXEC, 0o600))
        except OSError as error:
            outcome.error = error.errno or errno.EIO
            return -1, outcome
        if access == "create" and num_bytes:
            try:
                _allocate(file.fd, num_bytes)
            except OSError as error:
                outcome.error = error.errno or errno.EIO
                os.unlink(path)
                os.ftruncate(file.fd, 0)
                outcome.free = file.free_bytes()
                return -1, outcome
        number = next(self._numbers)
        self._files[number] = file
        return number, outcome

    def facts(self, file: int) -> FileFacts:
        size = os.fstat(self._files[file].fd).st_size
        return FileFacts(size, False, "the engine in Python has no direct transfers")

    def sync(self, file: int) -> FileOutcome:
        try:
            os.fdatasync(self._files[file].fd)
        except OSError as error:
            free = self._files[file].free_bytes()
            return FileOutcome(error=error.errno or errno.EIO, free=free)
        return FileOutcome()

    def close_file(self, file: int) -> None:
        del self._files[file]

    def submit(self, *, file: int, write: bool, address: int, num_bytes: int, offset: int) -> int:
        # An empty tensor has no address.
        raw = (ctypes.c_char * num_bytes).from_address(address) if num_bytes else b""
        memory = memoryview(raw).cast("B")
        outcome = FileOutcome(wanted=num_bytes, ended=time.monotonic())
        request = _Request(self._files[file], write, memory, offset, outcome)
        for start in range(0, num_bytes, self._block_size):
            end = min(start + self._block_size, num_bytes)
            request.pieces.append(self._executor.submit(request.transfer, start, end))
        ticket = next(self._numbers)
        self._requests[ticket] = request
        return ticket

    def over(self, ticket: int) -> bool:
        return all(piece.done() for piece in self._requests[ticket].pieces)

    def wait(self, ticket: int) -> FileOutcome:
        request = self._requests[ticket]
        wait(request.pieces)
        del self._requests[ticket]
        return request.outcome

    def shut_down(self) -> None:
        for request in self._requests.values():
            with request.lock:
                if request.outcome.error == 0:
                    request.outcome.error = errno.ECANCELED
        self._executor.shutdown(wait=True)


def _allocate(fd: int, num_bytes: int) -> None:
    """Blocks and the size of the file; the size alone where there are no blocks to reserve."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, num_bytes)
