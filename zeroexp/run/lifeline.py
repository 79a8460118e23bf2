"""Processes that end when they should: with their parent, and soon after they are told to.

Both are needed below Python: a rank that waits inside a collective runs no Python signal handler,
and a driver that is killed with SIGKILL tells nobody.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1

#: Variable with the pid of the process that must outlive this one.
PARENT = "ZEROEXP_LAUNCH_PARENT"


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


def end_on_sigterm(grace: float) -> None:
    """After SIGTERM this process has ``grace`` seconds to end by itself; then it is ended with exit
    code 143.

    The handlers of SIGTERM stay what they are (none: the process ends at once, as always). Python
    writes the number of every signal that has a handler to a wake-up descriptor from the C-level
    handler, which works while the main thread waits inside a collective; a thread reads it there.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while data := os.read(reader, 64):
            if signal.SIGTERM in data:
                time.sleep(grace)
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="zeroexp-end-on-sigterm", daemon=True).start()
