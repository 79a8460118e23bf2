"""The contenders of the AdamW kernel (:mod:`benchmarks.adamw`) and of the other kernels
(:mod:`benchmarks.passes`) as cases of a result file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.adamw import Contender, contenders, gpt_shapes
from benchmarks.machine import memory_bytes
from benchmarks.passes import PASSES
from zeroexp import ops

FLAT_ELEMENTS = 100_000_000
# AdamW, the largest: two flat states of 4 float32 and 1 bfloat16 tensors, and torch's 4 + 1.
BYTES_PER_ELEMENT = 3 * (4 * 4 + 2)
# Short cases are repeated until a sample takes long enough to be timed.
ELEMENTS_PER_SAMPLE = 100_000_000


def measure(rounds: int, elements: int = FLAT_ELEMENTS) -> dict[str, Any]:
    """Milliseconds a step, every contender in turn in every round, at one and two threads.

    Raises MemoryError before anything is allocated if the flat case does not fit.
    """
    if elements * BYTES_PER_ELEMENT > 0.9 * memory_bytes("MemAvailable"):
        raise MemoryError(
            f"{elements} elements need {elements * BYTES_PER_ELEMENT / 2**30:.1f} GiB"
        )
    shapes: dict[str, list[tuple[int, ...]]] = {
        f"flat {elements / 1e6:g} M": [(elements,)],
        "GPT shapes": gpt_shapes(),
    }
    before = torch.get_num_threads()
    cases = []
    try:
        for name, case in shapes.items():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                cases.append(_case(name, case, threads, rounds, contenders(case, threads)))
        for kernel, runs in PASSES.items():
            for name, case in shapes.items():
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    cases.append(_case(f"{kernel}, {name}", case, threads, rounds, runs(case)))
    finally:
        torch.set_num_threads(before)
    status = ops.status()
    return {
        "ops": {"compiled": status.compiled, "isa": status.isa, "reason": status.reason},
        "cases": cases,
    }


def _case(
    name: str,
    shapes: list[tuple[int, ...]],
    threads: int,
    rounds: int,
    runs: Mapping[str, Contender],
) -> dict[str, Any]:
    size = sum(torch.Size(shape).numel() for shape in shapes)
    repeat = max(1, ELEMENTS_PER_SAMPLE // size)
    samples: dict[str, list[float]] = {contender: [] for contender in runs}
    for index in range(rounds + 1):
        for contender, run in list(runs.items())[:: 1 if index % 2 else -1]:
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            if index:  # the first round warms up
                samples[contender].append((time.perf_counter() - start) / repeat * 1e3)
    return {
        "name": f"{name}, {threads} thread{'s' if threads > 1 else ''}",
        "what": f"{size / 1e6:.1f} million float32 elements in {len(shapes)} tensors "
        "(zeroexp's optimizers: one flat tensor; huge: on huge pages)",
        "unit": "ms",
        "samples": samples,
    }
