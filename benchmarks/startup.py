"""From the command to the end of the first step: zeroexp's driver, plain torchrun on the same
worker, and the same module and data under Lightning's DDP with its own launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

OVERRIDES = (
    "model=gpt_tiny",
    "zero=stage1",
    "precision=fp32",
    "logger=jsonl",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_steps=2",
    "trainer.val_batches=0",
    "launch.threads_per_rank=1",
)
TIMEOUT_SECONDS = 300


class StartFailed(Exception):
    """A start did not come to its first step; the message is the last line it printed."""


def _first_step(command: list[str], launch: Path | None, runs: Path) -> float:
    """Seconds from starting ``command`` to the end of the slowest rank's first step.

    ``launch`` is where the ranks leave it; None: in the only run below ``runs``.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.time()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartFailed(f"no first step within {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise StartFailed(lines[-1].replace(str(ROOT), ".") if lines else "no output")
    if launch is None:
        launch = next(runs.glob("*/*/launch"))
    files = [json.loads(path.read_text()) for path in launch.glob("rank*.json")]
    return float(max(file["first_step_at"] for file in files)) - began


def _driver(folder: Path) -> float:
    command = [sys.executable, "train.py", *OVERRIDES, f"paths.runs={folder}", "-q"]
    return _first_step(command, None, folder)


def _torchrun(folder: Path) -> float:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "zeroexp.run.worker", str(folder)),
    ]
    return _first_step(command, folder / "launch", folder)


def _lightning(folder: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.lightning_ddp", str(folder)]
    return _first_step(command, folder / "launch", folder)


VARIANTS = {"driver": _driver, "torchrun": _torchrun, "Lightning DDP": _lightning}


def measure(rounds: int) -> dict[str, Any]:
    """Every variant in turn, ``rounds`` times after one start that only fills the disk cache."""
    samples: dict[str, Any] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="zeroexp-startup-") as scratch:
        warm = Path(scratch) / "warm"
        # Without this one there is nothing to compare: its failure ends the benchmark.
        _driver(warm)
        config = next(warm.glob("*/*/config.yaml"))
        for index in range(rounds):
            for name, start in list(VARIANTS.items())[:: 1 if index % 2 else -1]:
                if isinstance(samples[name], str):
                    continue
                folder = Path(scratch) / f"{index}-{name.replace(' ', '-')}"
                if name != "driver":
                    (folder / "launch").mkdir(parents=True)
                    shutil.copy(config, folder)
                try:
                    samples[name].append(start(folder))
                except StartFailed as failure:
                    samples[name] = str(failure)
    case = {
        "name": "launch to first step",
        "what": f"2 ranks, `{' '.join(OVERRIDES)}`",
        "unit": "s",
        "samples": samples,
    }
    return {"cases": [case]}
