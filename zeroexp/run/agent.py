"""The elastic agent's process: ``python -m zeroexp.run.agent RUN_DIR`` (started by the driver,
never by hand).

It hands the job of ``launch/launch.json`` to torchrun's elastic agent, which starts the ranks and
watches them. Beside it a thread notes the moment and manner of every rank's end for
``launch/exits.json``: the agent itself reports ends in whole seconds and per polling interval, too
coarse to tell which of two ranks failed first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.lifeline import PARENT, die_with_parent
from zeroexp.run.procfs import environment_value, own_children

_POLL_SECONDS = 0.02


@dataclass
class Exit:
    """The end of one rank. ``exit_code`` is negative for a signal, as in :mod:`subprocess`; None
    while unknown.
    """

    rank: int
    pid: int
    #: seconds since the epoch, right to the polling interval (20 ms)
    time: float
    attempt: int
    exit_code: int | None = None


class ExitWatch(threading.Thread):
    """Notes how and when each rank ends, without taking the exit status away from the agent."""

    def __init__(self, ranks: int) -> None:
        super().__init__(name="zeroexp-exit-watch", daemon=True)
        self.exits: list[Exit] = []
        self._expected = ranks
        self._live: dict[int, tuple[int, int]] = {}  # pid -> (rank, attempt)
        self._known: set[int] = set()
        self._finished = threading.Event()

    def run(self) -> None:
        while not self._finished.wait(_POLL_SECONDS):
            if len(self._live) < self._expected:
                self._discover()
            self._collect()

    def finish(self) -> list[Exit]:
        """Stop watching; every end that was noted, in the order of time."""
        self._finished.set()
        self.join()
        self._collect()
        return self.exits

    def _discover(self) -> None:
        for pid in own_children():
            if pid not in self._known:
                rank = environment_value(
                    pid, "RANK"
                )  # unset until the child has become the rank's program
                if rank is not None and rank.isdigit():
                    attempt = environment_value(pid, "TORCHELASTIC_RESTART_COUNT") or "0"
                    self._live[pid] = (int(rank), int(attempt))
                    self._known.add(pid)

    def _collect(self) -> None:
        for pid, (rank, attempt) in list(self._live.items()):
            code: int | None = None
            try:
                # WNOWAIT leaves the process to be reaped by the agent
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if ended is None:
                    continue
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            except ChildProcessError:
                pass  # the agent reaped it since the last look; it knows the exit code
            self.exits.append(Exit(rank, pid, time.time(), attempt, code))
            del self._live[pid]


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
        "max_restarts": spec["retries"],
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(directory.launch / "elastic")),
    }
    if any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig)):
        options["shutdown_timeout"] = spec["grace"]
    os.environ[PARENT] = str(os.getpid())
    watch = ExitWatch(spec["ranks"])
    watch.start()
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
                end.exit_code = codes.get(end.pid)
        write_json(directory.exits, {"exits": [dataclasses.asdict(end) for end in exits]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
