"""The first and last things every rank does, whatever it runs: its log, its lifeline and its word
on a failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroexp.run import fault
from zeroexp.run.directory import RunDirectory
from zeroexp.run.launch import GRACE_SECONDS
from zeroexp.run.lifeline import ATTEMPT, PARENT, die_with_parent, end_on_sigterm
from zeroexp.run.terminal import FAILED_LINE, STARTED_LINE


@dataclass(frozen=True)
class Rank:
    """One process of a run. ``attempt`` counts restarts after a crash, from 0."""

    directory: RunDirectory
    rank: int
    local_rank: int
    world_size: int
    attempt: int = 0

    @classmethod
    def from_environment(cls, directory: RunDirectory) -> Rank:
        """The rank that torchrun's variables describe; rank 0 of 1 without them."""
        return cls(
            directory=directory,
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            attempt=int(os.environ.get(ATTEMPT, "0")),
        )


def log_to(path: Path) -> None:
    """Send everything this process and its children print, C code included, to the end of
    ``path``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@contextlib.contextmanager
def start_rank(run_dir: Path) -> Iterator[Rank]:
    """The frame around a rank's work; what it raises is recorded in errors/rankN.json and ends the
    process with 1.

    Log, lifeline and fault handler are set up before the body imports anything heavy, so that a
    failing import is seen like any other failure.
    """
    directory = RunDirectory(run_dir)
    rank = Rank.from_environment(directory)
    log_to(directory.log(rank.rank))
    if rank.attempt:
        print(f"{STARTED_LINE}{rank.attempt + 1}", flush=True)
    faulthandler.enable()
    parent = os.environ.pop(PARENT, "")
    if parent.isdigit():
        die_with_parent(int(parent))
    end_on_sigterm(GRACE_SECONDS, directory.stack(rank.rank))
    with recording(rank):
        yield rank


@contextlib.contextmanager
def recording(rank: Rank) -> Iterator[None]:
    """Record an exception of the body as this rank's failure, print it to the rank's log and exit
    with its code.
    """
    try:
        yield
    except SystemExit as error:
        # Told to end (lifeline), or the user's own sys.exit: after the finally blocks there is
        # nothing to wait for.
        _leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except Exception as error:
        # The agent tells this rank to end when another fails, often at this very moment.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            fault.record(rank.directory, rank.rank, error)
        # The line that makes the terminal stop copying this log: the driver shows the first
        # failure, which may be another rank's, before anything else.
        with contextlib.suppress(OSError):
            print(f"{FAILED_LINE}{rank.rank}", flush=True)
            traceback.print_exception(error)
        _leave(getattr(error, "exit_code", 1))


def _leave(code: int) -> None:
    """End this process now.

    Not through the interpreter's shutdown: that waits for data workers and communication threads
    whose peers are gone, and the other ranks learn of this end only when the process is gone.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
