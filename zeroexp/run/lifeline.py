"""Processes that end when they should: with their parent, and soon after they are told to.

Both are needed below Python: a rank that waits inside a collective runs no Python signal handler,
and a driver that is killed with SIGKILL tells nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

_PR_SET_PDEATHSIG = 1

#: Variable with the pid of the process that must outlive this one.
PARENT = "ZEROEXP_LAUNCH_PARENT"
#: Variable with the number of times the ranks of this run have been started before.
ATTEMPT = "ZEROEXP_LAUNCH_ATTEMPT"


def die_with_parent(expected: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies (Linux; elsewhere nothing
    happens).

    ``expected`` is the parent's pid as the parent knew it: if it is another one by now, the parent
    has died before the request could be made, and this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if expected is not None and os.getppid() != expected:
        os._exit(1)


def end_on_sigterm(grace: float, stack: Path) -> None:
    """On SIGTERM raise SystemExit(143) in the main thread, note in ``stack`` where every thread
    stood, and after ``grace`` seconds end the process with 143 whatever it does.

    Python writes the number of a signal to a wake-up descriptor from the C-level handler, which
    works while the main thread waits inside a collective; a thread reads it there. Handlers that
    are set later (Lightning's) change the first part only.
    """

    noting = threading.Lock()
    noted = threading.Event()

    def note() -> None:
        with noting:
            if not noted.is_set():
                with contextlib.suppress(OSError), open(stack, "w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file)
                noted.set()

    def leave(number: int, frame: types.FrameType | None) -> None:
        note()  # before the main thread leaves the place where the signal found it
        sys.exit(128 + number)

    def forget() -> None:
        # A forked child (a data worker) that is told to end must not end its parent.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    signal.signal(signal.SIGTERM, leave)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while data := os.read(reader, 64):
            if signal.SIGTERM in data:
                note()
                time.sleep(grace)
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="zeroexp-end-on-sigterm", daemon=True).start()
