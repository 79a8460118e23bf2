"""Room on the disk for a run's last words.

A run whose disk is full should still say so. ``launch/reserve`` holds room from the start; the
first process whose last words meet a full disk gives it up for all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory

#: Error files of a few ranks, their figures, status.json and result.json; written, not sparse.
RESERVE_BYTES = 64 << 10

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """True for the error of a write that found no room: a full disk, or a quota that is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def keep(directory: RunDirectory) -> None:
    """Take the room; raises ``OSError`` where there is not even that."""
    directory.launch.mkdir(exist_ok=True)
    try:
        directory.reserve.write_bytes(os.urandom(RESERVE_BYTES))  # nothing compresses it away
    except OSError:
        give_up(directory)
        raise


def give_up(directory: RunDirectory) -> None:
    """Free the room; nothing happens where it is free already."""
    with contextlib.suppress(OSError):
        directory.reserve.unlink()


def write_last(directory: RunDirectory, path: Path, value: Mapping[str, Any]) -> None:
    """``write_json`` for what has to be said on a full disk too; raises ``OSError`` if even the
    reserve is not enough.
    """
    try:
        write_json(path, value)
    except OSError as error:
        if not is_full(error):
            raise
        give_up(directory)
        write_json(path, value)


def no_room(directory: RunDirectory) -> bool:
    """True where the file system of the run has less left than the reserve."""
    try:
        found = os.statvfs(directory.path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < RESERVE_BYTES
