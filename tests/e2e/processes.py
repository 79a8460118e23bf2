"""Processes for end-to-end tests: started with a deadline, watched by their run's mark, killed
at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroexp.run import procfs
from zeroexp.run.environment import scrubbed

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


def environment(**more: str) -> dict[str, str]:
    return {**scrubbed(os.environ), "OMP_NUM_THREADS": "1", **more}


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``; fails the test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {seconds} s")


def wait_for_rows(run: Path, count: int, seconds: float = 150) -> None:
    """Wait until ``count`` steps of a real run have been measured."""
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= count, seconds, "steps"
    )


def in_group(command: list[str], group: Path | None) -> list[str]:
    """``command``, in a control group that is joined before anything is started."""
    if group is None:
        return command
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


class StubRun:
    """A driver with stub ranks in a process of its own."""

    def __init__(
        self,
        directory: Path,
        ranks: int,
        retries: int,
        *stub: str,
        within: Path | None = None,
        **env: str,
    ) -> None:
        self.directory = directory
        command = [sys.executable, str(HERE / "stub_driver.py"), str(directory), str(ranks)]
        self.process = subprocess.Popen(
            in_group([*command, str(retries), *stub], within),
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_id(self) -> str:
        def read() -> str | None:
            try:
                return str(
                    json.loads((self.directory / "launch" / "launch.json").read_text())["run_id"]
                )
            except (OSError, ValueError):
                return None

        return str(wait_until(read, 120, "launch.json"))

    def pid_of_rank(self, rank: int) -> int:
        def find() -> int | None:
            for pid in procfs.marked(self.run_id()):
                if procfs.environment_value(pid, "RANK") == str(rank):
                    return pid
            return None

        return int(wait_until(find, 120, f"rank {rank}"))

    def wait_for_step(self, step: int) -> None:
        log = self.directory / "rank0.log"
        wait_until(lambda: log.exists() and f"step {step}/" in log.read_text(), 120, f"step {step}")

    def verdict(self, seconds: float) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=seconds)
        assert out, err
        said: dict[str, Any] = json.loads(out.splitlines()[-1])
        return {**said, "output": out}

    def left_over(self) -> list[int]:
        return procfs.marked(self.run_id())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)
        with contextlib.suppress(OSError):
            spec = json.loads((self.directory / "launch" / "launch.json").read_text())
            procfs.kill_marked(spec["run_id"])


#: The smallest GPT that still has two units, on random tokens: seconds per run are imports.
TINY = [
    "data=synthetic",
    "model.layers=2",
    "model.dim=32",
    "model.heads=2",
    "model.vocab_size=64",
    "data.seq_len=16",
    "data.batch_size=4",
    "trainer.max_steps=4",
    "trainer.val_batches=1",
    "trainer.log_every=2",
    "precision=fp32",
    "measure.warmup_steps=1",
    "logger=jsonl",
]


class Command:
    """``python train.py`` in a directory of its own."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, within: Path | None = None, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            in_group([sys.executable, str(CHECKOUT / "train.py"), *words], within),
            cwd=self.where,
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def __call__(
        self, *words: str, seconds: float = 250, within: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, within=within, **env)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
            raise AssertionError(f"{words} took more than {seconds} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def end(self) -> None:
        """Kill what a failed test has left running; the ranks die with their driver."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=30)

    def runs(self, pattern: str = "runs/*/*") -> list[Path]:
        return sorted(self.where.glob(pattern))
