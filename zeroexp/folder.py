"""A folder that a run wants to write in: whether it can, and how much room there is."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from zeroexp.errors import ConfigError, Problem


def unwritable(path: Path, error: OSError, key: str = "paths.runs") -> ConfigError:
    """The one message for a directory that cannot be written; ``key`` is what named it."""
    reason = error.strerror or str(error)
    fix = f"Point {key} at a directory you can write."
    return ConfigError([Problem(key, f"cannot write to {path}: {reason}.", fix)])


def check_writable(path: Path, key: str) -> None:
    """Make ``path`` if it is not there, and write and remove a file in it.

    Raises:
        ConfigError: on ``key``, with the path and the system's reason; nothing is left of what was
            made.
    """
    made = missing_parents(path)
    try:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(parents=True, exist_ok=True)
        # A name of its own: the ranks of a run look at one folder at the same time.
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=path) as probe:
            probe.write(b"zeroexp")
            probe.flush()
    except OSError as error:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise unwritable(path, error, key) from error


def missing_parents(path: Path) -> list[Path]:
    """The directories of ``path`` that do not exist yet, deepest first."""
    return [p for p in (path, *path.parents) if not p.exists()]


def existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def free_bytes(path: Path) -> int | None:
    """What this user may still write on the file system of ``path``, which need not exist yet;
    None where that cannot be told."""
    try:
        found = os.statvfs(existing(path))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
