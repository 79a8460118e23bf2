"""A driver for tests: ``python stub_driver.py RUN_DIR RANKS RETRIES MODE [RANK]`` runs stub ranks
and prints its verdict as one line of JSON, last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from zeroexp.run.directory import RunDirectory
from zeroexp.run.launch import Interrupt, Job, run_job


def main(run_dir: str, ranks: str, retries: str, *stub: str) -> int:
    directory = RunDirectory(Path(run_dir))
    rank_program = str(Path(__file__).with_name("stub_rank.py"))
    job = Job(directory, int(ranks), [rank_program, run_dir, *stub], 1, retries=int(retries))
    with Interrupt() as interrupt:
        verdict = run_job(job, sys.stdout, interrupt)
    first = verdict.first.rank if verdict.first is not None else None
    said = {
        "status": verdict.status,
        "reason": verdict.reason,
        "failed_rank": verdict.failed_rank,
        "first_rank": first,
    }
    print(json.dumps(said), flush=True)
    return interrupt.exit_code if interrupt.signal is not None else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
