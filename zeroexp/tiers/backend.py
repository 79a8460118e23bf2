"""What carries out the transfers of a :class:`~zeroexp.tiers.FileEngine`, and which one it is."""

from __future__ import annotations

from typing import Protocol

from zeroexp.errors import ZeroexpError
from zeroexp.ops.native import native
from zeroexp.tiers.python_pool import PythonPool

ENGINES = ("auto", "io_uring", "threads")

# A transfer of the kernel is at most 2 GiB less a page; a direct one is a multiple of a block.
_BLOCK, _LARGEST_BLOCK, _MOST = 4096, 1 << 30, 4096


class Outcome(Protocol):
    """What became of an open or a transfer, in bytes.

    ``error`` is 0, an errno, or -1 where the file ends before the bytes wanted; ``free`` is -1
    where it is unknown; ``ended`` is when a transfer was over, in seconds of time.monotonic().
    """

    @property
    def error(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def ended(self) -> float: ...


class Facts(Protocol):
    """A file's size in bytes, and whether its transfers go past the page cache."""

    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def why_buffered(self) -> str: ...


class Backend(Protocol):
    """The compiled engine (csrc/io/engine.hpp), or :class:`PythonPool`, which does the same."""

    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def open(self, path: str, access: str, num_bytes: int) -> tuple[int, Outcome]: ...
    def facts(self, file: int) -> Facts: ...
    def sync(self, file: int) -> Outcome: ...
    def close_file(self, file: int) -> None: ...
    def submit(
        self, *, file: int, write: bool, address: int, num_bytes: int, offset: int
    ) -> int: ...
    def over(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> Outcome: ...
    def shut_down(self) -> None: ...


def make_backend(engine: str, queue_depth: int, block_size: int, threads: int) -> Backend:
    """The backend for :class:`~zeroexp.tiers.FileEngine`'s arguments.

    Raises ValueError for arguments that make no sense, ZeroexpError where io_uring is asked for by
    name and cannot be had.
    """
    if engine not in ENGINES:
        raise ValueError(f"FileEngine: engine is {engine!r}; there are {', '.join(ENGINES)}")
    if block_size % _BLOCK or not 0 < block_size <= _LARGEST_BLOCK:
        raise ValueError(
            f"FileEngine: block_size is {block_size} bytes; wanted a multiple of {_BLOCK} up to "
            "1 GiB"
        )
    for name, value in (("queue_depth", queue_depth), ("threads", threads)):
        if not 0 < value <= _MOST:
            raise ValueError(f"FileEngine: {name} is {value}; wanted 1 to {_MOST}")
    ops = native()
    if ops.file_engine is None:
        if engine == "io_uring":
            raise ZeroexpError(_refused(ops.status.reason))
        return PythonPool(ops.status.reason, block_size=block_size, threads=threads)
    try:
        return ops.file_engine(
            kind=engine, queue_depth=queue_depth, block_size=block_size, threads=threads
        )
    except RuntimeError as error:
        if engine != "io_uring":
            raise
        raise ZeroexpError(_refused(str(error))) from error


def _refused(why: str) -> str:
    return (
        f"the file engine io_uring cannot be had here: {why}; use engine=auto, which takes the "
        "best there is, or engine=threads"
    )
