"""One rank of one mode: a process that lives through a whole run and takes steps when it is told
to.

Commands come and replies go as :mod:`benchmarks.rank` says.

    python -m benchmarks.worker WORK MODE RANK WORLD_SIZE STORE_FILE FOLDER REPLY_FD

FOLDER is where a mode that uses a disk keeps its files.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import (
    disk_bytes,
    live_tensor_bytes,
    reset_peak,
    resident_bytes,
    unique_bytes,
)
from benchmarks.modes import mode_named
from benchmarks.peer import Peer, fused_adamw
from benchmarks.rank import join, serve, versions
from benchmarks.work import WORKS, Work


def _load_libraries() -> None:
    """Map the libraries that any training step uses, so that the baseline holds them and the peak
    above it is the mode's own."""
    warm = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    optimizer = fused_adamw(warm.parameters())
    warm(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))


def _per_step(
    before: tuple[int, int] | None, after: tuple[int, int] | None, count: int
) -> list[float] | None:
    """Bytes [read, written] of one of ``count`` steps: what one leaves on its way at the end, the
    one before the first left too."""
    if before is None or after is None:
        return None
    return [(b - a) / count for a, b in zip(before, after, strict=True)]


class Worker:
    """Builds the model, then answers commands."""

    def __init__(self, work: Work, mode_name: str, rank: int, folder: str) -> None:
        self.work = work
        self.rank = rank
        self.mode = mode_named(mode_name)
        self.start = importlib.import_module(self.mode.module).start
        _load_libraries()
        self.baseline, _ = resident_bytes()
        self.peak_resets = reset_peak()
        self.steps_done = 0
        options = {**self.mode.options, **({"folder": folder} if self.mode.disk else {})}
        self.peer: Peer = self.start(work.model(), options)

    def steps(self, count: int) -> dict[str, Any]:
        """Take ``count`` steps without pause; seconds of each, from the end of the one before (the
        first from a barrier)."""
        batches = [self.work.batch(self.rank, self.steps_done + i) for i in range(count)]
        losses, ends = [], []
        dist.barrier()
        cpu, moved = time.process_time(), disk_bytes()
        ends.append(time.monotonic())
        for inputs, targets in batches:
            losses.append(self.peer.backward(inputs, targets))
            self.peer.update()
            ends.append(time.monotonic())
        cpu = time.process_time() - cpu
        self.steps_done += count
        _, peak = resident_bytes()
        after = disk_bytes()
        return {
            "seconds": [b - a for a, b in itertools.pairwise(ends)],
            "end": ends[-1],
            "cpu_seconds": cpu,
            "losses": [float(loss) for loss in losses],
            "peak_rss": peak,
            "disk": _per_step(moved, after, count),
        }

    def memory(self) -> dict[str, Any]:
        """Take one step and count bytes in its middle, when gradients are ready and the optimizer
        has yet to run: state by kind (storages counted once), all live tensors, and the process."""
        _, peak = resident_bytes()  # before counting, which needs memory of its own
        self.peer.backward(*self.work.batch(self.rank, self.steps_done))
        state = self.peer.state()
        found = {
            "state": unique_bytes([*state.params, *state.grads, *state.optim]),
            "params": unique_bytes(state.params),
            "grads": unique_bytes(state.grads),
            "optim": unique_bytes(state.optim),
            "padding": state.padding_bytes,
            "tensors": live_tensor_bytes(),
            "rss_baseline": self.baseline,
            "peak_rss": peak,
            "peak_resets": self.peak_resets,
        }
        del state
        self.peer.update()
        self.steps_done += 1
        return found

    def reset_peak(self) -> dict[str, Any]:
        """Forget the peak so far (that of building the model): what follows is the peak of steady
        training."""
        return {"done": reset_peak()}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command of the harness; the names are those in ``do``."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "steps": self.steps,
            "memory": self.memory,
            "reset_peak": self.reset_peak,
            "versions": versions,
        }
        action = actions[command.pop("do")]
        return action(**command)


def main(argv: list[str]) -> None:
    work, mode, rank, world, store, folder, reply_fd = argv
    join(int(rank), int(world), store)
    serve(int(reply_fd), Worker(WORKS[work], mode, int(rank), folder).answer)


if __name__ == "__main__":
    main(sys.argv[1:])
