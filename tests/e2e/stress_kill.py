"""Kill one random rank at a random moment, again and again, and hold the run to its promise.

    python tests/e2e/stress_kill.py [--kills 20] [--seed 0] [--ranks 2]

Each trial starts ``python train.py`` on a small model, waits until a random moment between the
start of the ranks and some steps of training, and sends SIGKILL to one rank. It must end within 15
seconds with status ``crash``, the dead rank named, and no process left. Prints a table; exit code 1
if a trial fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import TINY, Command, wait_until

from zeroexp.run import procfs

DEADLINE_SECONDS = 15.0


@dataclass
class Trial:
    victim: int
    step: str
    seconds: float
    status: str
    named: str
    left: int
    problem: str = ""


def one(number: int, ranks: int, rng: random.Random) -> Trial:
    """One run, one kill."""
    victim = rng.randrange(ranks)
    with tempfile.TemporaryDirectory(prefix="zeroexp-kill-") as place:
        train = Command(Path(place))
        stage = f"zero=stage{number % 4}"
        words = [w for w in TINY if not w.startswith(("trainer.max_steps", "data.batch_size"))]
        words += [f"data.batch_size={4 * ranks}", "trainer.max_steps=1000000"]
        process = train.start(*words, f"trainer.devices={ranks}", stage)
        try:
            spec = wait_until(lambda: train.runs("runs/*/*/launch/launch.json"), 60, "launch.json")[
                0
            ]
            run, run_id = spec.parents[1], json.loads(spec.read_text())["run_id"]

            def rank_pid() -> int | None:
                for pid in procfs.marked(run_id):
                    if procfs.environment_value(pid, "RANK") == str(victim):
                        return pid
                return None

            pid = wait_until(rank_pid, 90, f"rank {victim}")
            if rng.random() < 0.25:  # while it imports, builds the model, meets the others
                time.sleep(rng.uniform(0, 8))
            else:  # while it trains
                wait_until(lambda: _last_step(run) > 0, 180, "step 1")
                time.sleep(rng.uniform(0, 3))
            step = str(_last_step(run) or "-")
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            process.communicate(timeout=90)
            seconds = time.monotonic() - began
            left = len(procfs.marked(run_id))
            status = json.loads((run / "status.json").read_text())
            trial = Trial(victim, step, seconds, status["status"], str(status["failed_rank"]), left)
            faults = []
            if seconds > DEADLINE_SECONDS:
                faults.append(f"took more than {DEADLINE_SECONDS:.0f} s")
            if status["status"] != "crash" or status["failed_rank"] != victim:
                faults.append(status["reason"])
            if left:
                faults.append("processes left")
            if process.returncode != 1:
                faults.append(f"exit code {process.returncode}")
            trial.problem = "; ".join(faults)
            return trial
        finally:
            train.end()


def _last_step(run: Path) -> int:
    try:
        rows = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return int(json.loads(rows[-1])["step"]) if rows else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    print("trial  killed rank  at step  end after (s)  status  named rank  left  problem")
    trials = []
    for number in range(asked.kills):
        trial = one(number, asked.ranks, rng)
        trials.append(trial)
        print(
            f"{number:>5}  {trial.victim:>11}  {trial.step:>7}  {trial.seconds:>13.2f}  "
            f"{trial.status:<6}  {trial.named:>10}  {trial.left:>4}  {trial.problem or '-'}",
            flush=True,
        )
    failed = [trial for trial in trials if trial.problem]
    slowest = max((trial.seconds for trial in trials), default=0.0)
    print(f"{len(trials) - len(failed)} of {len(trials)} as promised; slowest end {slowest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
