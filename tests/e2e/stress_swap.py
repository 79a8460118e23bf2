"""Kill runs with everything on disk at random moments, and hold the next ones to their promise.

    python tests/e2e/stress_swap.py [--kills 20] [--seed 0] [--ranks 2]

All runs share one swap folder. A run is killed with SIGKILL: one of its ranks, its agent, or its
driver (all die with it), between the start of the ranks and some steps of training. What it trained
must be what an undisturbed run trains, loss by loss, and nothing of it may be left but swap files,
which the next start says it removed and which the last one, undisturbed, must find gone. Prints a
table; exit code 1 if a trial fails.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import TINY, Command, wait_until

from zeroexp.run import procfs

STEPS = 20
REMOVED = "of swap files"


def losses(run: Path) -> list[float]:
    """Of the whole rows of metrics.jsonl."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def folders(place: Path) -> list[Path]:
    swap = place / "runs" / "swap"
    return sorted(swap.iterdir()) if swap.is_dir() else []


class Trials:
    def __init__(self, place: Path, ranks: int, rng: random.Random) -> None:
        self.place, self.ranks, self.rng = place, ranks, rng
        self.train = Command(place)
        words = [w for w in TINY if not w.startswith(("trainer.max_steps", "data.batch_size"))]
        self.words = [
            *words,
            "zero=stage3",
            "offload=nvme_params",
            "trainer.val_batches=0",
            f"trainer.devices={ranks}",
            f"data.batch_size={4 * ranks}",
        ]

    def undisturbed(self) -> list[float]:
        """The losses of a run that nobody kills; raises where it does not end well and clean."""
        known = set(self.train.runs("runs/train/*"))
        done = self.train(*self.words, f"trainer.max_steps={STEPS}", seconds=600)
        (run,) = set(self.train.runs("runs/train/*")) - known
        if done.returncode or folders(self.place):
            raise SystemExit(f"{done.stdout}{done.stderr}\nleft: {folders(self.place)}")
        return losses(run)

    def one(self, number: int, reference: list[float]) -> str:
        """One run, one kill; what is wrong with it."""
        left_before = len(folders(self.place))
        known = set(self.train.runs("runs/train/*"))
        process = self.train.start(*self.words, "trainer.max_steps=1000000")
        (run,) = wait_until(
            lambda: [
                r
                for r in set(self.train.runs("runs/train/*")) - known
                if (r / "launch" / "launch.json").is_file()
            ],
            120,
            "launch.json",
        )
        run_id = json.loads((run / "launch" / "launch.json").read_text())["run_id"]
        victim = self.rng.choice(["driver", "driver", "agent", *map(str, range(self.ranks))])

        def pid_of(who: str) -> int | None:
            if who == "driver":
                return process.pid
            for pid in procfs.marked(run_id):
                if who == "agent" and procfs.environment_value(pid, "RANK") is None:
                    return pid
                if procfs.environment_value(pid, "RANK") == who:
                    return pid
            return None

        wait_until(lambda: pid_of("0"), 120, "rank 0")
        if self.rng.random() < 0.4:  # while it imports, builds the model, fills its files
            until = time.monotonic() + self.rng.uniform(0, 12)
            wait_until(lambda: time.monotonic() > until or len(losses(run)) > 0, 60, "moment")
        else:
            wait_until(lambda: losses(run), 300, "step 1")
            time.sleep(self.rng.uniform(0, 3))
        pid = wait_until(lambda: pid_of(victim), 60, victim)
        os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=90)
        wait_until(lambda: not procfs.marked(run_id), 30, "end of all processes")
        trained, left = losses(run), len(folders(self.place))
        faults = []
        if trained[:STEPS] != reference[: len(trained)]:
            faults.append(f"losses {trained[:STEPS]}, wanted {reference}")
        if left_before and REMOVED not in out:
            faults.append("said nothing of what the run before had left")
        if victim != "driver" and left:
            faults.append("swap files left by a run whose driver lived")
        if left > 2 * self.ranks:
            faults.append("more folders than one run makes")
        print(
            f"{number:>5}  {victim:>6}  {len(trained):>7}  {left_before:>6}  {left:>5}  "
            f"{'; '.join(faults) or '-'}",
            flush=True,
        )
        return "; ".join(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeroexp-swap-kill-") as place:
        trials = Trials(Path(place), asked.ranks, random.Random(asked.seed))
        try:
            reference = trials.undisturbed()
            print("trial  killed  at step  before  after  problem    (folders of swap files)")
            faults = [trials.one(number, reference) for number in range(asked.kills)]
            after = trials.undisturbed()
        finally:
            trials.train.end()
    failed = [fault for fault in faults if fault]
    same = after == reference
    print(f"{len(faults) - len(failed)} of {len(faults)} as promised; the run after them ", end="")
    print("trains the same and leaves nothing" if same else f"trains {after}, wanted {reference}")
    return 0 if same and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
