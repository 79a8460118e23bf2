"""From the command to an answer that needs no rank: composing a configuration and reporting on it,
in fresh processes that import no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import ROOT

#: What is answered: the whole table of a plan, and the one message for a wrong key.
COMMANDS = {
    "plan": ("plan", "zero=stage3", "trainer.devices=2", "trainer.accelerator=cpu"),
    "explain": ("explain", "zero.stage", "zero=stage3"),
    "a wrong key": ("zero.stgae=3",),
}
EXIT_CODES = {"plan": 0, "explain": 0, "a wrong key": 2}
TIMEOUT_SECONDS = 60

# Ends the process with 99 where torch was imported on the way.
_PROGRAM = """\
import sys
from zeroexp.cli import main
code = main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""


class AnswerFailed(Exception):
    """A command did not end as it should, or imported torch."""


def _answer(name: str) -> float:
    """Seconds from starting a fresh interpreter to its end."""
    command = [sys.executable, "-c", _PROGRAM, *COMMANDS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode == 99:
        raise AnswerFailed(f"{name} imports torch")
    if done.returncode != EXIT_CODES[name]:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise AnswerFailed(lines[-1].replace(str(ROOT), ".") if lines else "no output")
    return seconds


def measure(rounds: int) -> dict[str, Any]:
    """Every command in turn, ``rounds`` times after one that only fills the disk cache."""
    samples: dict[str, Any] = {name: [] for name in COMMANDS}
    for index in range(rounds + 1):
        for name in list(COMMANDS)[:: 1 if index % 2 else -1]:
            if isinstance(samples[name], str):
                continue
            try:
                seconds = _answer(name)
            except AnswerFailed as failure:
                samples[name] = str(failure)
                continue
            if index:
                samples[name].append(seconds)
    case = {
        "name": "command to answer",
        "what": "a fresh process; " + ", ".join(f"`{' '.join(c)}`" for c in COMMANDS.values()),
        "unit": "s",
        "samples": samples,
    }
    return {"cases": [case]}
