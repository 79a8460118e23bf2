"""Where the ranks of an external launch meet: MASTER_ADDR and MASTER_PORT, checked before torch
sees them, and a deadline that holds whatever answers there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

from zeroexp.errors import ConfigError, Problem

#: Seconds that the store's own deadline gets to speak first: it knows more.
_LATER_SECONDS = 2.0

_NUMBERS = ("RANK", "LOCAL_RANK")
_STARTER = "torchrun sets it for every rank"


def check_address(environ: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` with every variable of torchrun's that cannot be used; nothing
    happens where neither RANK nor WORLD_SIZE is set (Slurm, or nobody has started ranks).
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return
    found: list[Problem] = []
    for name in _NUMBERS:
        text = environ.get(name)
        if text is None or not text.isdecimal():
            what = "is not set." if text is None else f"{text} is not the number of a rank."
            found.append(Problem(name, what, f"Set it to 0, 1, …; {_STARTER}"))
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    fix = f"Set it to the machine of rank 0, such as localhost; {_STARTER}"
    if not host:
        found.append(Problem("MASTER_ADDR", "is not set.", fix))
    else:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            found.append(Problem("MASTER_ADDR", f"no host {host} is known: {reason}.", fix))
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        what = f"{port} is no port." if port else "is not set."
        fix = f"Set it to a free port of that machine, 1 to 65535; {_STARTER}"
        found.append(Problem("MASTER_PORT", what, fix))
    if found:
        raise ConfigError(found)


def unreached(rank: int, world: int, timeout: float, reason: str = "") -> str:
    """The one message of a rank that did not find the others within ``timeout`` seconds."""
    host, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
    why = reason or "what answers there is not the store of this launch"
    return (
        f"rank {rank} of {world} did not meet the others at {host}:{port} within {timeout:g} s "
        f"(launch.timeout): {why}. See who has the port with  ss -ltnp 'sport = :{port}'  on that "
        f"machine, and whether every rank was started with the same MASTER_ADDR and MASTER_PORT"
    )


@contextlib.contextmanager
def deadline(rank: int, world: int, timeout: float) -> Iterator[None]:
    """End this process with code 1 and one message when the body takes longer than ``timeout``.

    torch's store waits without a deadline for the first answer of whatever listens on the port, in
    C++, where no exception reaches it.
    """

    def end() -> None:
        print(f"zeroexp: {unreached(rank, world, timeout)}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout + _LATER_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
