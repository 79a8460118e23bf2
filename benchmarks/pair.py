"""Processes, one a rank, seen from the harness: start, ask, stop."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import peer_env
from benchmarks.machine import ROOT


class PairFailed(Exception):
    """A rank ended, answered nothing in time, or could not start; the message is its last word."""


class Pair:
    """``world_size`` processes ``python -m COMMAND RANK WORLD_SIZE STORE_FILE FOLDER REPLY_FD``, of
    the ``interpreter`` that :mod:`benchmarks.modes` tells of.

    What they keep on disk lies in FOLDER below ``disk`` and goes with them. ``launched`` is the
    monotonic time just before the first process was started; the clock is the system's, so workers'
    times can be compared with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        interpreter: str,
        world_size: int,
        threads: int,
        *,
        disk: Path,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zeroexp-bench-")
        folder = Path(self._folder.name)
        disk.mkdir(parents=True, exist_ok=True)
        self._disk = tempfile.TemporaryDirectory(prefix="zeroexp-bench-", dir=disk)
        python = str(peer_env.PYTHON) if interpreter == "peers" else sys.executable
        self._processes: list[subprocess.Popen[str]] = []
        self._replies: list[IO[str]] = []
        self._logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self.launched = time.monotonic()
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": "lo",
                **(peer_env.variables() if interpreter == "peers" else {}),
            }
            environment.pop("PYTHONPATH", None)
            read_fd, write_fd = os.pipe()
            arguments = [
                *command,
                str(rank),
                str(world_size),
                str(folder / "store"),
                self._disk.name,
                str(write_fd),
            ]
            with self._logs[rank].open("w") as log:
                try:
                    process = subprocess.Popen(
                        [python, "-m", *arguments],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(write_fd,),
                        text=True,
                    )
                except OSError as error:
                    os.close(read_fd)
                    self.close()
                    raise PairFailed(
                        f"cannot start {interpreter} interpreter: {error.strerror}"
                    ) from error
                finally:
                    os.close(write_fd)
            self._processes.append(process)
            self._replies.append(os.fdopen(read_fd))

    def ask(self, do: str, timeout: float = 600.0, **arguments: object) -> list[dict[str, Any]]:
        """Send one command to every rank and wait for all replies, in rank order; raises
        PairFailed."""
        line = json.dumps({"do": do, **arguments}) + "\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None  # opened as a pipe above
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise PairFailed(self._last_word(rank)) from None
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            waiting = {
                reply: rank for rank, reply in enumerate(self._replies) if rank not in answers
            }
            ready, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise PairFailed(f"no answer to {do} within {timeout:.0f} s")
            for reply in ready:
                text = reply.readline()
                if not text:
                    raise PairFailed(self._last_word(waiting[reply]))
                answers[waiting[reply]] = json.loads(text)
        return [answers[rank] for rank in range(len(self._processes))]

    def log(self) -> str:
        """All that the ranks have printed so far."""
        return "\n".join(path.read_text(errors="replace") for path in self._logs)

    def _last_word(self, rank: int) -> str:
        lines = [line.strip() for line in self._logs[rank].read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("[W")]
        last = lines[-1].removeprefix(f"[rank{rank}]: ") if lines else "ended without a word"
        return f"rank {rank}: {last.replace(str(ROOT), '.')}"[:300]

    def close(self) -> None:
        """End the processes: ask first, kill what is left after ten seconds."""
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                try:
                    process.stdin.write(json.dumps({"do": "quit"}) + "\n")
                    process.stdin.close()
                except OSError:
                    pass  # it has just ended by itself
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reply in self._replies:
            reply.close()
        self._folder.cleanup()
        self._disk.cleanup()
