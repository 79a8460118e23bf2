"""Stage 3 with its state on other tiers beside DeepSpeed's, on the same work in one run, and what
the disk gives to all ranks at once, measured at the end of every round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import disk
from benchmarks.contender import Unavailable
from benchmarks.training import Settings, compare
from benchmarks.uring_loop import MIB
from benchmarks.work import WORKS

# Master copy and two moments of AdamW in float32, per parameter: what a step reads and writes.
STREAMED_BYTES = 12
LEAST_BYTES = 16 * MIB


def measure(
    work: str, modes: Sequence[str], settings: Settings, say: Callable[[str], None], folder: Path
) -> Iterator[dict[str, Any]]:
    """After each round the ``work`` and ``disk`` parts of a result file, all samples so far."""
    size = -(-STREAMED_BYTES * WORKS[work].num_params // settings.world_size // MIB) * MIB
    found: dict[str, Any] = {"num_bytes": max(size, LEAST_BYTES), "rounds": [], "reason": None}
    with ExitStack() as stack:
        try:
            rates = stack.enter_context(
                disk.measured(folder, settings.world_size, found["num_bytes"])
            )
            rates.rates()  # the first pass warms up
        except Unavailable as error:
            found["reason"] = str(error)
            say(f"disk: missing: {error}")
        for so_far in compare(work, modes, settings, say, folder):
            if found["reason"] is None:
                found["rounds"].append(rates.rates())
                shown = (f"{kind} {rate / 1e9:.2f}" for kind, rate in found["rounds"][-1].items())
                say(f"disk, {settings.world_size} processes at once, GB/s: {', '.join(shown)}")
            yield {"work": so_far, "disk": found}
