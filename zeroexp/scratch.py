"""A folder for the swap files of one process, which never outlives the process for long.

Its life is told by a lock, not by a process number, which another container or a later process may
have too: a file in the folder is held with an exclusive flock from before anything else is written
there until the end, and the kernel lets go of it when the process dies, however that happens. Who
removes a folder holds the lock meanwhile, and takes its file away last but the folder itself. So
whatever instruction a process was killed at, what is left is an empty folder, or one whose lock
nobody holds; the next start removes both. A start whose folder is taken for such a rest, in the
moments before it has its lock, makes another one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from zeroexp.errors import ConfigError, Problem

_LOG = logging.getLogger("zeroexp")

_KEY = "offload.nvme.dir"
_PREFIX = "zeroexp-swap-"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_OURS = re.compile(rf"{_PREFIX}[0-9a-f]{{16}}-{_NAME}")
# Nobody else has such a file: a folder that was renamed to look like ours is left alone.
_LOCK = ".zeroexp-swap-lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Every start that sweeps at the same time can cost a start one folder, at most.
_MAX_TRIES = 1000

_FIXES = {
    errno.ENOTDIR: "That is a file; name a directory.",
    errno.EACCES: "Name a directory that this user may read and write.",
    errno.EPERM: "Name a directory that this user may read and write.",
    errno.EROFS: "Name a directory on a file system that is not read-only.",
    errno.ENOSPC: "Free space there, or name a directory on another file system.",
    errno.EDQUOT: "The quota is used up: free space there, or use another file system.",
}
_FIX = "Name a directory on a local disk, which is made if need be."


class ScratchFolder:
    """``parent/zeroexp-swap-<unique>-<name>``, of this process, removed with all in it at the end.

    ``parent`` is made where it is missing; what dead processes left there is removed first, which
    ``swept`` lists as (path, bytes of its files) and the log says (INFO). Ends with :meth:`close`,
    ``with``, the last reference, or the process. Nothing is followed out of the folder, and nothing
    of another user is touched. Raises ConfigError that names ``offload.nvme.dir``, ValueError for a
    name that is not letters, digits, ``.``, ``_`` and ``-``.
    """

    def __init__(self, parent: Path, name: str) -> None:
        if re.fullmatch(_NAME, name) is None:
            raise ValueError(f"ScratchFolder: name is {name!r}; wanted up to 64 of A-Za-z0-9._-")
        parent = Path(parent).absolute()
        try:
            parent_fd = _open_parent(parent)
            try:
                self.swept = tuple((parent / left, size) for left, size in _sweep(parent_fd))
                folder, identity, lock_fd = _make(parent_fd, name)
            except BaseException:
                os.close(parent_fd)
                raise
        except OSError as error:
            raise ConfigError([_problem(parent, error)]) from error
        for path, size in self.swept:
            _LOG.info("removed %s (%d bytes), which a dead process left", path, size)
        self.path = parent / folder
        self._end = weakref.finalize(self, _end, os.getpid(), parent_fd, folder, identity, lock_fd)

    @property
    def free_bytes(self) -> int:
        """Bytes that this user may still write there."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Removes the folder. In a fork of its process: does nothing."""
        self._end()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sweep(parent: Path) -> tuple[tuple[Path, int], ...]:
    """Removes what dead processes left in ``parent``, without making a folder there: path and bytes
    of each. Where nothing can be read or removed, nothing is done."""
    try:
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        return tuple((parent / left, size) for left, size in _sweep(parent_fd))
    except OSError:
        return ()
    finally:
        os.close(parent_fd)


def holds_any(parent: Path) -> bool:
    """Whether there is such a folder in ``parent``, whoever's it is."""
    try:
        return any(_OURS.fullmatch(name) for name in os.listdir(parent))
    except OSError:
        return False


def _open_parent(parent: Path) -> int:
    with contextlib.suppress(FileExistsError):  # a file or a dead link: opening it says which
        os.makedirs(parent, 0o700, exist_ok=True)
    return os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _problem(parent: Path, error: OSError) -> Problem:
    code = error.errno or errno.EIO
    return Problem(
        key=_KEY,
        problem=f"no swap folder can be made in {parent}: {os.strerror(code)} "
        f"({errno.errorcode.get(code, code)}).",
        fix=_FIXES.get(code, _FIX),
    )


def _make(parent_fd: int, name: str) -> tuple[str, tuple[int, int], int]:
    """A new folder, what tells it from any other, and the descriptor that holds its lock."""
    for _ in range(_MAX_TRIES):
        folder = f"{_PREFIX}{secrets.token_hex(8)}-{name}"
        os.mkdir(folder, 0o700, dir_fd=parent_fd)
        try:
            with _folder(parent_fd, folder) as folder_fd:
                lock_fd = _new_lock(folder_fd)
                identity = _identity(folder_fd)
        except FileNotFoundError:  # a sweep found it empty
            continue
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(folder, dir_fd=parent_fd)
            raise
        if lock_fd is not None:
            return folder, identity, lock_fd
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _new_lock(folder_fd: int) -> int | None:
    """The folder's lock, held; None where a sweep had it first, and removes the folder."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    lock_fd = os.open(_LOCK, flags, 0o600, dir_fd=folder_fd)
    try:
        if _locked(folder_fd, lock_fd):
            return lock_fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(_LOCK, dir_fd=folder_fd)
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    return None


def _end(
    process: int, parent_fd: int, folder: str, identity: tuple[int, int], lock_fd: int
) -> None:
    if os.getpid() != process:
        return
    try:
        with _folder(parent_fd, folder) as folder_fd:
            # By the folder, not by its lock: cleaners of /tmp take away what is old.
            if _identity(folder_fd) == identity:
                _empty(folder_fd)
                _take_away(parent_fd, folder, folder_fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("%s stays behind: %s", folder, error)
    finally:
        # Not LOCK_UN: a fork that still lives shares the lock, and would lose it.
        os.close(lock_fd)
        os.close(parent_fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _sweep(parent_fd: int) -> Iterator[tuple[str, int]]:
    """Removes the folders whose process is gone: name and bytes of each."""
    with os.scandir(parent_fd) as entries:
        names = sorted(entry.name for entry in entries if _OURS.fullmatch(entry.name))
    for folder in names:
        try:
            size = _remove(parent_fd, folder)
        except FileNotFoundError:  # another start was faster
            continue
        except OSError as error:
            _LOG.warning("%s may be left by a dead process and stays: %s", folder, error)
            continue
        if size:  # without a byte it may have been a start, which makes another folder
            yield folder, size


def _remove(parent_fd: int, folder: str) -> int:
    """Removes a folder whose lock nobody holds: bytes of its files."""
    if not _is_mine(os.stat(folder, dir_fd=parent_fd, follow_symlinks=False)):
        return 0  # before it is opened: other users' folders are no reason for a warning
    with _folder(parent_fd, folder) as folder_fd:
        if not _is_mine(os.fstat(folder_fd)):
            return 0
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock_fd = os.open(_LOCK, flags, dir_fd=folder_fd)
        except FileNotFoundError:
            # Killed before it had a lock or after it gave it up: empty. Else it has one by now, or
            # somebody took the lock away, and nobody can tell whether its owner lives.
            try:
                os.rmdir(folder, dir_fd=parent_fd)
            except OSError:
                if not os.access(_LOCK, os.F_OK, dir_fd=folder_fd):
                    raise
            return 0
        try:
            if os.fstat(lock_fd).st_uid != os.geteuid() or not _locked(folder_fd, lock_fd):
                return 0
            size = _empty(folder_fd)
            _take_away(parent_fd, folder, folder_fd)
            return size
        finally:
            os.close(lock_fd)


@contextlib.contextmanager
def _folder(parent_fd: int, folder: str) -> Iterator[int]:
    """A descriptor of the folder itself: what is done through it stays in it, whatever its name
    comes to mean. A link (ELOOP, ENOTDIR) counts as missing."""
    try:
        folder_fd = os.open(folder, _FOLDER, dir_fd=parent_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
        raise
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _locked(folder_fd: int, lock_fd: int) -> bool:
    """Takes the lock: False where another process holds it or has removed it meanwhile."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(folder_fd, lock_fd)


def _is_at(folder_fd: int, lock_fd: int) -> bool:
    """Whether the folder's lock file is the one that is open as ``lock_fd``."""
    try:
        there = os.stat(_LOCK, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(lock_fd))


def _empty(folder_fd: int, spare: str = _LOCK) -> int:
    """Removes everything but the lock file: bytes of the files."""
    size = 0
    with os.scandir(folder_fd) as entries:
        names = [entry.name for entry in entries if entry.name != spare]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                with _folder(folder_fd, name) as inner_fd:
                    size += _empty(inner_fd, spare="")
                os.rmdir(name, dir_fd=folder_fd)
            else:
                os.unlink(name, dir_fd=folder_fd)
                size += status.st_size
    return size


def _is_mine(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _take_away(parent_fd: int, folder: str, folder_fd: int) -> None:
    """The lock file of an emptied folder, then the folder."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_LOCK, dir_fd=folder_fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder, dir_fd=parent_fd)
