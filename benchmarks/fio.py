"""fio, where it is installed, at the same work: the whole file in place, direct, by io_uring."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contender import Unavailable, last_line

# It counts whole milliseconds: several passes make one of them a small part.
LOOPS = 4


@dataclass(frozen=True)
class Job:
    """``path`` has ``num_bytes``; ``block`` bytes a transfer, ``depth`` of them open."""

    path: Path
    num_bytes: int
    block: int
    depth: int


@contextmanager
def passes(job: Job) -> Iterator[Callable[[str], float]]:
    """Seconds of one pass that reads or writes. Raises Unavailable."""
    program = shutil.which("fio")
    if program is None:
        raise Unavailable("not installed: fio")

    def run(what: str) -> float:
        command = [
            *(program, "--name=pass", f"--filename={job.path}", f"--rw={what}"),
            *(f"--size={job.num_bytes}", f"--bs={job.block}", f"--iodepth={job.depth}"),
            *("--ioengine=io_uring", "--direct=1", f"--loops={LOOPS}", "--thread"),
            # Buffers where a huge page could begin: more it has not, unless some are reserved.
            *("--iomem_align=2m", "--fallocate=none", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(last_line(done.stderr or done.stdout))
        return seconds(done.stdout, what)

    run("read")
    yield run


def seconds(report: str, what: str) -> float:
    """Of one of the passes, from fio's JSON (notes may come before it)."""
    found = json.loads(report[report.index("{") :])["jobs"][0][what]
    return float(found["runtime"]) / 1e3 / LOOPS
