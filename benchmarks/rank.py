"""One rank of something that is measured: it lives through a whole run and acts when it is told to.

The harness writes one JSON command a line to standard input and reads one JSON reply a line from
``reply_fd`` (standard output belongs to the libraries, some of which print). Between commands the
process blocks in ``read``, so that of all processes only one is active at a time.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def join(rank: int, world_size: int, store: str) -> None:
    """Meet the other ranks over gloo, at the file ``store``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # torch 2.13 renames collectives that peers still call.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=600),
    )


def serve(reply_fd: int, answer: Answer) -> None:
    """Answer commands until the one to quit; does not return."""
    with os.fdopen(reply_fd, "w") as replies:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            replies.write(json.dumps(answer(command)) + "\n")
            replies.flush()
    # The interpreter's own teardown of some peers hangs or crashes after the results are in;
    # nothing is left to save.
    sys.stdout.flush()
    os._exit(0)


def versions() -> dict[str, str]:
    """Of what this process computes with."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if "deepspeed" in sys.modules:
        found["deepspeed"] = sys.modules["deepspeed"].__version__
    return found
