"""How a run stands: the classes of status.json, and the one that a dead driver left behind."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroexp.run.atomic import read_json, write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.procfs import start_ticks

RUNNING = "running"
OK = "ok"
OOM = "oom"
TIMEOUT = "timeout"
NAN = "nan"
CRASH = "crash"
WONT_FIT = "wont_fit"
CONFIG = "config"
INTERRUPTED = "interrupted"

#: Every class a run can be in; all but the first are final.
CLASSES = (RUNNING, OK, OOM, TIMEOUT, NAN, CRASH, WONT_FIT, CONFIG, INTERRUPTED)


@dataclass(frozen=True)
class Status:
    """One state of a run: its class, why, and the rank that failed first (None where no single rank
    did).
    """

    status: str
    reason: str = ""
    failed_rank: int | None = None
    #: seconds since the epoch when this state was written
    time: float = field(default_factory=time.time)
    #: who watches the run (pid, boot ticks of its start, host): tells a live run from one whose
    #: driver is gone
    driver: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in CLASSES:
            raise ValueError(f"no status class {self.status!r}; there are {', '.join(CLASSES)}")

    @property
    def exit_code(self) -> int:
        """What the command line ends with: 0 ok, 1 failed run, 2 configuration, 130 interrupted."""
        return {OK: 0, RUNNING: 0, CONFIG: 2, WONT_FIT: 1, INTERRUPTED: 130}.get(self.status, 1)

    def write(self, directory: RunDirectory) -> None:
        """Write status.json atomically."""
        write_json(directory.status, asdict(self))


def running() -> Status:
    """The state of a run that this process has started and watches."""
    pid = os.getpid()
    return Status(
        RUNNING, driver={"pid": pid, "start_ticks": start_ticks(pid), "host": socket.gethostname()}
    )


def read(directory: RunDirectory) -> Status | None:
    """The state in status.json, or None without one. A ``running`` whose driver is gone reads
    ``interrupted``.
    """
    found = read_json(directory.status)
    if found is None or found.get("status") not in CLASSES:
        return None
    status = Status(
        found["status"],
        str(found.get("reason") or ""),
        found.get("failed_rank"),
        float(found.get("time") or 0.0),
        dict(found.get("driver") or {}),
    )
    if status.status == RUNNING and _is_gone(status.driver):
        return Status(
            INTERRUPTED,
            "the process that watched this run is gone",
            None,
            status.time,
            status.driver,
        )
    return status


def _is_gone(driver: dict[str, Any]) -> bool:
    if driver.get("host") != socket.gethostname():
        return False  # another machine's process cannot be looked up from here
    pid = driver.get("pid")
    # A pid is used again after a while; the same pid with the same start time is the same process.
    return not isinstance(pid, int) or start_ticks(pid) != driver.get("start_ticks")
