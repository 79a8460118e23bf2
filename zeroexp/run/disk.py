"""What a directory offers to swap files: file system, direct transfers, and rates by block size and
queue depth. Imports torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroexp.config.sections.offload import NvmeConfig
from zeroexp.errors import FileError
from zeroexp.ops import HostRange
from zeroexp.tiers import EngineStatus, FileEngine

MIB = 1 << 20
BLOCK_SIZES = (512 << 10, 2 * MIB, 8 * MIB)
QUEUE_DEPTHS = (1, 4, 16)
# Bytes of one timed pass. Every setting writes one, and the first one another: 240 MiB together.
PASS_BYTES = 24 * MIB
READS = 3
# Of the one setting of a run: more than its blocks on the way at once.
RATE_BYTES = 64 * MIB
SECONDS = 10.0

# File systems that are memory: what they say about rates says nothing about a disk.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
# Of settings that are this close to the best one, the one that keeps least memory busy is taken.
_AS_GOOD = 0.9


@dataclass(frozen=True)
class DiskRate:
    """Bytes a second that one setting reaches: reads the best of three, writes once."""

    block_size: int
    queue_depth: int
    read: float
    write: float

    @property
    def both(self) -> float:
        """Bytes a second of reading and writing the same bytes one after the other."""
        return 2 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True)
class DiskProbe:
    """What was found below ``directory``.

    ``file_system`` is its type ("" where that cannot be told), ``free_bytes`` what this user may
    still write. ``problem`` says why nothing can be written there, and the rest is then empty.
    ``rates`` holds what was measured in the time allowed.
    """

    directory: Path
    file_system: str
    free_bytes: int
    problem: str = ""
    engine: EngineStatus | None = None
    direct: bool = False
    rates: tuple[DiskRate, ...] = ()

    @property
    def recommended(self) -> DiskRate | None:
        """The setting to use; None where nothing was measured."""
        return best_rate(self.rates)


def best_rate(rates: Sequence[DiskRate]) -> DiskRate | None:
    """Of the settings within a tenth of the best, the one with the fewest bytes on their way."""
    if not rates:
        return None
    enough = _AS_GOOD * max(rate.both for rate in rates)
    good = [rate for rate in rates if rate.both >= enough]
    return min(good, key=lambda rate: (rate.block_size * rate.queue_depth, -rate.both))


def file_system_of(path: Path) -> str:
    """The type of the file system that ``path`` is on (``ext4``), "" where that cannot be told."""
    where = os.path.realpath(path)
    found, longest = "", -1
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            # man 5 proc_pid_mountinfo: ... root mount-point options [tags] - type source options
            before, _, after = line.partition(" - ")
            mount = before.split()[4].encode().decode("unicode_escape")
            inside = where == mount or where.startswith(mount.rstrip("/") + "/")
            # Of mounts over each other the last one counts.
            if inside and len(mount) >= longest:
                found, longest = after.split()[0], len(mount)
    return found


def probe(directory: Path, *, seconds: float = SECONDS) -> DiskProbe:
    """Measures in ``directory``, which exists: at most 256 MiB are written to a file without a
    name, so that nothing is left however this ends; after ``seconds`` no other setting is begun.
    """
    kind, stat = file_system_of(directory), os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    try:
        with FileEngine() as engine, _nameless(engine, directory) as path:
            with engine.open(path, writable=True) as file:
                direct = file.direct
            status = engine.status()
            rates = tuple(_rates(path, time.monotonic() + seconds))
    except FileError as error:
        return DiskProbe(directory, kind, free, problem=str(error))
    return DiskProbe(directory, kind, free, engine=status, direct=direct, rates=rates)


def rate_of(nvme: NvmeConfig) -> DiskRate | None:
    """What the engine of ``nvme`` (resolved) reaches in its directory while nothing else is done:
    at most 320 MiB to and from a file without a name. None where that cannot be measured."""
    assert nvme.dir is not None
    block_size, depth = nvme.block_size, nvme.queue_depth
    try:
        buffer = HostRange(RATE_BYTES).tensor(torch.uint8).fill_(1)
        with (
            FileEngine(
                nvme.engine, block_size=block_size, queue_depth=depth, threads=nvme.threads
            ) as engine,
            _nameless(engine, Path(nvme.dir), RATE_BYTES) as path,
            engine.open(path, writable=True) as file,
        ):
            file.write(buffer)  # the first write into new blocks is slower than any other
            write = _seconds(lambda: file.write(buffer))
            read = min(_seconds(lambda: file.read(buffer)) for _ in range(READS))
    except (FileError, OSError, RuntimeError):  # of a figure a run must not fail
        return None
    return DiskRate(block_size, depth, RATE_BYTES / read, RATE_BYTES / write)


@contextlib.contextmanager
def _nameless(engine: FileEngine, directory: Path, num_bytes: int = PASS_BYTES) -> Iterator[Path]:
    """A path to open a new file of ``num_bytes`` by, as long as this lasts."""
    name = directory / f".zeroexp-doctor-{os.getpid()}"
    try:
        engine.create(name, num_bytes).close()
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    finally:
        name.unlink(missing_ok=True)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _rates(path: Path, deadline: float) -> Iterator[DiskRate]:
    buffer = HostRange(PASS_BYTES).tensor(torch.uint8).fill_(1)
    written_once = False
    for block_size in BLOCK_SIZES:
        for queue_depth in QUEUE_DEPTHS:
            if time.monotonic() > deadline:
                return
            with (
                FileEngine(
                    block_size=block_size, queue_depth=queue_depth, threads=queue_depth
                ) as engine,
                engine.open(path, writable=True) as file,
            ):
                if not written_once:  # the first write into new blocks is slower than any other
                    file.write(buffer)
                    written_once = True
                write = _seconds(lambda: file.write(buffer))
                read = min(_seconds(lambda: file.read(buffer)) for _ in range(READS))
            yield DiskRate(block_size, queue_depth, PASS_BYTES / read, PASS_BYTES / write)


def _seconds(transfer: Callable[[], None]) -> float:
    start = time.perf_counter()
    transfer()
    return time.perf_counter() - start
