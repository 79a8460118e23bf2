"""Start the ranks of one run in fresh processes, watch them, and say what became of them.

    driver (this process, no torch)
      └─ agent   python -m zeroexp.run.agent RUN_DIR      torchrun's elastic agent
           ├─ rank 0   python -m zeroexp.run.worker RUN_DIR
           └─ rank 1 …

Every process below the driver dies with its parent (the kernel sees to that), and whatever a rank
may have started is found by the run's mark in its environment and killed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from zeroexp.run import reserve, status
from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.environment import for_ranks
from zeroexp.run.failure import Verdict, verdict
from zeroexp.run.lifeline import ATTEMPT, PARENT
from zeroexp.run.procfs import kill_marked, oom_kills
from zeroexp.run.terminal import Follower

#: Seconds a rank has to end after SIGTERM, before it is ended (lifeline.end_on_sigterm).
GRACE_SECONDS = 5.0
#: Seconds after which a whole run that was told to end is killed, agent and all.
_PATIENCE_SECONDS = GRACE_SECONDS + 3.0
_POLL_SECONDS = 0.05

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """The processes of one run: ``ranks`` times ``python *command``, each with ``threads`` compute
    threads.
    """

    directory: RunDirectory
    ranks: int
    command: Sequence[str]
    threads: int
    retries: int = 0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class Interrupt:
    """Catches Ctrl-C, SIGTERM and SIGHUP for the length of a ``with`` block and keeps the first of
    them.

    A signal that the shell told this process to ignore (``nohup``) stays ignored. Outside the main
    thread nothing is caught, since only the main thread can.
    """

    def __init__(self) -> None:
        #: number of the signal that asked for the end, or None
        self.signal: int | None = None
        #: how many such signals have come; the second one asks for the end at once
        self.count = 0
        self._before: dict[int, Callable[[int, types.FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Interrupt:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, self._on_signal)
                    self._before[number] = before
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.signal = self.signal or number
        self.count += 1

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells report it: 130 for Ctrl-C."""
        return 128 + (self.signal or signal.SIGINT)


def interrupted(interrupt: Interrupt) -> Verdict:
    """The verdict on a run that the signal of ``interrupt`` ended."""
    name = signal.Signals(interrupt.signal or signal.SIGINT).name
    return Verdict(status.INTERRUPTED, "Ctrl-C" if name == "SIGINT" else f"ended by {name}")


def run_job(job: Job, out: IO[str], interrupt: Interrupt, *, quiet: bool = False) -> Verdict:
    """Run ``job`` to its end, showing rank 0's output on ``out``; never raises for what happens in
    a rank.

    After a crash or a timeout the ranks are started again, ``job.retries`` times at most, under a
    new agent: the store of the one before still holds the addresses of ranks that are gone. On
    return no process of the run is left.
    """
    directory = job.directory
    directory.launch.mkdir(exist_ok=True)
    follower = Follower(directory.log(0), out, live=out.isatty(), show=not quiet)
    for attempt in range(job.retries + 1):
        shutil.rmtree(directory.errors, ignore_errors=True)
        directory.exits.unlink(missing_ok=True)
        if attempt:
            with contextlib.suppress(OSError):
                reserve.keep(directory)
        found = _attempt(job, attempt, follower, interrupt)
        if found.status not in (status.CRASH, status.TIMEOUT) or attempt == job.retries:
            break
        out.write(f"zeroexp: {found.status}: {found.reason}\n")
        out.write(f"zeroexp: starting again, retry {attempt + 1} of {job.retries}\n")
    return found


def _attempt(job: Job, attempt: int, follower: Follower, interrupt: Interrupt) -> Verdict:
    directory = job.directory
    run_id = uuid.uuid4().hex
    spec = {
        "run_id": run_id,
        "ranks": job.ranks,
        "grace": int(GRACE_SECONDS),
        "command": list(job.command),
    }
    write_json(directory.spec, spec)
    environ = for_ranks(job.environ, run_id=run_id, threads=job.threads)
    environ[PARENT] = str(os.getpid())
    environ[ATTEMPT] = str(attempt)
    kills_before = oom_kills()
    with open(directory.agent_log, "ab") as agent_log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "zeroexp.run.agent", str(directory.path)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=agent_log,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C in the terminal reaches the driver alone, which then ends
            # the ranks in order.
            start_new_session=True,
        )
        try:
            code = _wait(agent, follower, interrupt)
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            kill_marked(run_id)
            follower.finish()
            shutil.rmtree(directory.elastic, ignore_errors=True)
    if interrupt.signal is not None:
        return interrupted(interrupt)
    if code == 0:
        return Verdict(status.OK)
    kills_after = oom_kills()
    known = kills_after is not None and kills_before is not None
    kills = (kills_after or 0) - (kills_before or 0) if known else 0
    return verdict(directory, agent_code=code, oom_kills=kills)


def _wait(agent: subprocess.Popen[bytes], follower: Follower, interrupt: Interrupt) -> int:
    """Exit code of the agent; an interrupt is passed on to it, and with patience gone it is
    killed.
    """
    told_at: float | None = None
    while True:
        code = agent.poll()
        follower.poll()
        if code is not None:
            return code
        if interrupt.signal is not None:
            now = time.monotonic()
            if told_at is None:
                told_at = now
                agent.send_signal(signal.SIGTERM)
            elif interrupt.count > 1 or now - told_at > _PATIENCE_SECONDS:
                agent.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(_POLL_SECONDS)
