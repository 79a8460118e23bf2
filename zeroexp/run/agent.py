"""The elastic agent's process: ``python -m zeroexp.run.agent RUN_DIR`` (started by the driver,
never by hand).

It hands the job of ``launch/launch.json`` to torchrun's elastic agent, which starts the ranks and
watches them. Beside it a thread notes the moment and manner of every rank's end for
``launch/exits.json``: the agent itself reports ends in whole seconds and per polling interval, too
coarse to tell which of two ranks failed first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroexp.run.directory import RunDirectory
from zeroexp.run.lifeline import PARENT, die_with_parent
from zeroexp.run.procfs import environment_value, own_children
from zeroexp.run.reserve import write_last

_DISCOVER_SECONDS = 0.02


@dataclass
class Exit:
    """The end of one rank. ``exit_code`` is negative for a signal, as in :mod:`subprocess`; None
    where the agent took it away first and only the agent knows.
    """

    rank: int
    pid: int
    time: float  # seconds since the epoch
    exit_code: int | None = None


class ExitWatch:
    """Notes how and when each rank ends, and ends those that do not follow a failed one.

    A thread per rank waits for its end without reaping it (that is the agent's to do). When one has
    failed, the agent tells the others to end; any that is still there ``patience`` seconds later is
    killed, whatever keeps it.
    """

    def __init__(self, ranks: int, patience: float) -> None:
        self._expected = ranks
        self._patience = patience
        self._lock = threading.Lock()
        self._exits: list[Exit] = []
        self._live: dict[int, threading.Thread] = {}  # pid -> the thread that waits for it
        self._overdue: threading.Timer | None = None
        threading.Thread(target=self._discover, name="zeroexp-ranks", daemon=True).start()

    def finish(self) -> list[Exit]:
        """Every end, in the order of time; the ranks have ended by now."""
        for thread in list(self._live.values()):
            thread.join(timeout=1)
        if self._overdue is not None:
            self._overdue.cancel()
        with self._lock:
            return list(self._exits)

    def _discover(self) -> None:
        while len(self._live) < self._expected:
            for pid in own_children():
                rank = environment_value(
                    pid, "RANK"
                )  # unset until it has become the rank's program
                if pid not in self._live and rank is not None and rank.isdigit():
                    waiter = threading.Thread(target=self._wait, args=(pid, int(rank)), daemon=True)
                    self._live[pid] = waiter
                    waiter.start()
            time.sleep(_DISCOVER_SECONDS)

    def _wait(self, pid: int, rank: int) -> None:
        code: int | None = None
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with self._lock:
            self._exits.append(Exit(rank, pid, time.time(), code))
            if code and self._overdue is None:
                self._overdue = threading.Timer(self._patience, self._kill_rest)
                self._overdue.daemon = True
                self._overdue.start()

    def _kill_rest(self) -> None:
        with self._lock:
            ended = {end.pid for end in self._exits}
        for pid in self._live:
            if pid not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run the job described in ``argv[0]/launch/launch.json``; 0 when every rank ended well, else
    1.
    """
    parent = os.environ.pop(PARENT, "")
    die_with_parent(int(parent) if parent.isdigit() else None)
    directory = RunDirectory(Path(argv[0]))
    spec: dict[str, Any] = json.loads(directory.spec.read_text(encoding="utf-8"))

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": spec["ranks"],
        "run_id": spec["run_id"],
        "rdzv_backend": "c10d",
        # Port 0: the system picks a free port and the agent's own store tells the ranks, so no two
        # runs can meet.
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,  # the driver starts a new agent, with a new store, instead
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(directory.elastic)),
    }
    if any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig)):
        options["shutdown_timeout"] = spec["grace"]
    os.environ[PARENT] = str(os.getpid())
    watch = ExitWatch(spec["ranks"], spec["grace"] + 2.0)
    codes: dict[int, int] = {}
    try:
        elastic_launch(LaunchConfig(**options), sys.executable)(*spec["command"])
    except ChildFailedError as error:
        codes = {failure.pid: failure.exitcode for failure in error.failures.values()}
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        exits = watch.finish()
        for end in exits:
            if end.exit_code is None:
                end.exit_code = codes.get(end.pid, 0)
        ends = {"exits": [dataclasses.asdict(end) for end in exits]}
        write_last(directory, directory.exits, ends)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is said and written; taking torch down again would only keep the driver
