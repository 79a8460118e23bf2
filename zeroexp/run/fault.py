"""A rank's own word on why it failed: the exception, its class of status and the moment, in
``errors/rankN.json``.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from zeroexp.errors import CollectiveTimeout, ConfigError, NonFiniteError, ZeroexpError
from zeroexp.run import status
from zeroexp.run.directory import RunDirectory
from zeroexp.run.reserve import is_full, write_last

# What gloo, NCCL and the store say to a rank whose peer has gone. Such an error is a consequence of
# another rank's end.
_LOST_PEER = re.compile(
    r"connection (to .* broke|was closed|closed|reset|refused)|closed by peer|broken pipe|"
    r"socket (closed|timeout)|"
    r"remote process exited|connection timed out|recvValue failed|sendBytes failed|"
    r"failed to (recv|send)|heartbeat monitor|application timeout caused pair closure",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|unable to mmap", re.IGNORECASE
)


def lost_peer(message: str) -> bool:
    """True for the message of an error that only says that another rank is gone."""
    return bool(_LOST_PEER.search(message))


def classify(error: BaseException) -> str:
    """The status class of an exception that ended a rank; causes (``raise … from …``) are looked at
    too.
    """
    link: BaseException | None = error
    while link is not None:
        found = _class_of(link)
        if found != status.CRASH:
            return found
        link = link.__cause__
    return status.CRASH


def _class_of(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return status.CONFIG
    if isinstance(error, NonFiniteError):
        return status.NAN
    if isinstance(error, KeyboardInterrupt):
        return status.INTERRUPTED
    message = str(error)
    if isinstance(error, CollectiveTimeout):
        return status.CRASH if lost_peer(message) else status.TIMEOUT
    torch = sys.modules.get(
        "torch"
    )  # a rank that failed before torch was imported needs no torch to say so
    if isinstance(error, MemoryError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    ):
        return status.OOM
    if isinstance(error, (RuntimeError, OSError)):
        # The CPU allocator, mmap and the process groups raise these two classes and say the rest in
        # words.
        if _NO_MEMORY.search(message):
            return status.OOM
        if _TIMED_OUT.search(message) and not lost_peer(message):
            return status.TIMEOUT
    return status.CRASH


def _library_of(filename: str) -> str | None:
    """The library a stack frame lies in, None for the user's own code."""
    parts = Path(filename).parts
    for packages in ("site-packages", "dist-packages"):
        if packages in parts[:-1]:
            return parts[parts.index(packages) + 1].removesuffix(".py")
    own = Path(__file__).parents[1]  # strategies/ stands beside zeroexp/ in a checkout
    if Path(filename).is_relative_to(own) or Path(filename).is_relative_to(
        own.parent / "strategies"
    ):
        return "zeroexp"
    return "Python" if filename.startswith(("<frozen", sys.base_prefix)) else None


def said(error: BaseException, directory: RunDirectory) -> str:
    """The message of ``error``; a write that found no room always says on which disk."""
    first = error
    while not is_full(first) and (first.__cause__ or first.__context__) is not None:
        first = first.__cause__ or first.__context__ or first
    if not is_full(first):
        return str(error)
    assert isinstance(first, OSError)  # for the type checker: is_full said so
    return f"{first.strerror}: {first.filename or directory.path}"


def brief_traceback(error: BaseException) -> str:
    """The traceback with the frames of libraries folded, the last frame and the user's own shown.

    An error that zeroexp raises on purpose says all there is to say: its message alone.
    """
    if isinstance(error, ZeroexpError):
        return ""
    lines = ["Traceback (most recent call last):\n"]
    frames = traceback.extract_tb(error.__traceback__)
    folded: list[str] = []
    for i, frame in enumerate(frames):
        library = _library_of(frame.filename)
        if library is not None and i < len(frames) - 1:
            folded.append(library)
            continue
        if folded:
            names = ", ".join(dict.fromkeys(folded))
            lines.append(f"  ... {len(folded)} frames in {names}\n")
            folded = []
        lines += traceback.format_list([frame])
    lines += traceback.format_exception_only(error)
    if error.__cause__ is not None:
        lines += ["caused by: ", *traceback.format_exception_only(error.__cause__)]
    return "".join(lines)


def record(
    directory: RunDirectory, rank: int, error: BaseException, *, at: float | None = None
) -> None:
    """Write ``errors/rank<rank>.json``: rank, time, kind, message, traceback (whole and brief),
    status. Raises ``OSError`` where the disk does not even take that.
    """
    directory.errors.mkdir(exist_ok=True)
    value: dict[str, Any] = {
        "rank": rank,
        "time": time.time() if at is None else at,
        "kind": type(error).__name__,
        "message": said(error, directory),
        "brief": brief_traceback(error),
        "traceback": "".join(traceback.format_exception(error)),
        "status": classify(error),
    }
    write_last(directory, directory.error(rank), value)
