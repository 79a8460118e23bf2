"""zeroexp's MoE layer beside DeepSpeed's and beside the dense layer that does as much work.

All of them make forward and backward passes in turn in every round, on the same weights and
batches, with and without dropped tokens; what each computed is compared too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.moe_result import VARIANTS, Case
from benchmarks.moe_work import MoeWork
from benchmarks.system import System

EXPERTS, TOP_K, RANKS = (8, 64), (1, 2), (1, 2)


def measure(
    rounds: int, steps: int, say: Callable[[str], None], **sizes: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds of one pass, the slower rank, the median of ``steps``; after each case yields
    what a result file says of all cases so far. ``sizes`` of :class:`MoeWork` may be changed."""
    cases: list[dict[str, Any]] = []
    found_versions: dict[str, str] = {}
    for ranks in RANKS:
        systems = {
            module: System(["benchmarks.moe_worker", module], interpreter, ranks)
            for module, interpreter in {(v.module, v.interpreter) for v in VARIANTS.values()}
        }
        try:
            for experts, top_k in itertools.product(EXPERTS, TOP_K):
                work = MoeWork(experts, top_k, **sizes)
                case = Case(experts, top_k, ranks)
                samples: dict[str, Any] = {name: [] for name in VARIANTS}
                marks: dict[str, list[float]] = {}
                for index in range(rounds):
                    for name in list(VARIANTS)[:: -1 if index % 2 else 1]:
                        variant = VARIANTS[name]
                        system = systems[variant.module]
                        asked = dataclasses.replace(work, capacity=variant.capacity)
                        replies = system.ask("passes", work=dataclasses.asdict(asked), count=steps)
                        if replies is None:
                            samples[name] = system.reason
                            continue
                        samples[name].append(_milliseconds(replies))
                        marks[name] = _norms(replies)
                        found_versions |= replies[0]["versions"]
                        say(f"{case.name} round {index + 1}: {name} {samples[name][-1]:.1f} ms")
                cases.append(
                    {
                        "name": case.name,
                        "what": f"{work.tokens} tokens a rank, "
                        f"{ranks * work.assignments // experts} an expert in the mean",
                        "unit": "ms",
                        "samples": samples,
                        "marks": marks,
                    }
                )
                yield {
                    "cases": cases,
                    "versions": found_versions,
                    "settings": {"rounds": rounds, "steps": steps, "threads": 1},
                }
        finally:
            for system in systems.values():
                system.close()


def _milliseconds(replies: list[dict[str, Any]]) -> float:
    each = zip(*(reply["seconds"] for reply in replies), strict=True)
    return median(max(ranks) for ranks in each) * 1e3


def _norms(replies: list[dict[str, Any]]) -> list[float]:
    """Over all ranks: tokens with an output, then norms."""
    tokens, *squares = (sum(each) for each in zip(*(r["marks"] for r in replies), strict=True))
    return [float(tokens), *(square**0.5 for square in squares)]
