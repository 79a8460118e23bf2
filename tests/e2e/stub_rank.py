"""A rank for tests of the launching machinery: gloo collectives in a loop, no Lightning and no
model.

``python stub_rank.py RUN_DIR MODE [RANK]``. Modes: ``ok`` (5 all-reduces), ``loop`` (all-reduces
for ever), ``raise`` (RANK raises at its third), ``exit`` (RANK ends with code 3), ``hang`` (RANK
stops taking part), ``child`` (as loop, RANK having started a grandchild in a session of its own),
``eat`` (RANK takes memory until there is none), ``env`` (writes its environment to
RUN_DIR/env<rank>.json).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from zeroexp.run.rank import start_rank


def main(run_dir: str, mode: str, culprit: str = "1") -> None:
    with start_rank(Path(run_dir)) as context:
        if mode == "env":
            Path(run_dir, f"env{context.rank}.json").write_text(json.dumps(dict(os.environ)))
            return
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", timeout=timedelta(seconds=float(os.environ.get("STUB_TIMEOUT", "60")))
        )
        is_culprit = context.rank == int(culprit)
        if mode == "child" and is_culprit:
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            )
        step = 0
        while mode not in ("ok", "once") or step < 5:
            step += 1
            if is_culprit and step == 3:
                if mode == "raise" or (mode == "once" and context.attempt == 0):
                    raise ValueError("boom")
                if mode == "eat":
                    eaten = []
                    while True:
                        eaten.append(b"x" * (16 << 20))
                if mode == "exit":
                    os._exit(3)
                if mode == "hang":
                    time.sleep(600)
            dist.all_reduce(torch.ones(1000))
            if context.rank == 0:
                print(f"step {step}/5  loss 1.0", flush=True)
            time.sleep(0.01)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
