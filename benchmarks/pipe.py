"""zeroexp's pipeline beside torch's and DeepSpeed's, on the same model, cut and micro-batches.

In every round all of them make passes and steps in turn. What the executor itself costs is measured
on a model of tiny layers, and its bubble beside the simulator's for the costs of that round.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
from typing import Any

from benchmarks.pipe_result import (
    BY_ACTIONS,
    BY_LAYERS,
    CPU,
    IDLE,
    MEASURED,
    OURS,
    PASSES,
    SPAN,
    STEP,
    VARIANTS,
    Variant,
)
from benchmarks.pipe_work import PipeWork
from benchmarks.system import Replies, System
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedules import make_schedule
from zeroexp.pipeline.simulate import simulate

TINY = PipeWork(vocab=64, context=16, dim=16, layers=6, heads=1, samples=1, length=8)
"""Layers that take next to nothing."""

COMPARED = 3
"""Steps whose losses must agree."""


class Case:
    """A case of a result file as it grows."""

    def __init__(self, name: str, what: str, unit: str) -> None:
        self.name, self.what, self.unit = name, what, unit
        self.samples: dict[str, Any] = {}
        self.losses: dict[str, list[float]] = {}

    def add(self, variant: str, value: float) -> None:
        self.samples.setdefault(variant, []).append(value)

    def data(self) -> dict[str, Any]:
        found = {key: vars(self)[key] for key in ("name", "what", "unit", "samples")}
        return found | ({"losses": self.losses} if self.losses else {})


def measure(
    rounds: int,
    steps: int,
    say: Callable[[str], None],
    names: Sequence[str] = tuple(VARIANTS),
    work: PipeWork | None = None,
) -> Iterator[dict[str, Any]]:
    """After each round yields what a result file says so far: ``steps`` timed passes and steps of
    every variant in ``names`` a round, after one that is not timed."""
    work = work or PipeWork()
    variants = {name: VARIANTS[name] for name in names}
    passes = Case(PASSES, f"of {work.micro_batches} micro-batches, the slower rank", "ms")
    step = Case(STEP, "the same with AdamW, the slower rank", "ms")
    cpu = Case(
        CPU,
        "beyond the modules' own forward and backward, per rank and action; layers of width "
        f"{TINY.dim}",
        "us",
    )
    span = Case(SPAN, "of zeroexp, from a barrier to the end of the last action", "ms")
    idle = Case(IDLE, "of both ranks' time in it", "%")
    systems = {name: _system(variant, work) for name, variant in variants.items()}
    small = {name: _system(v, TINY) for name, v in variants.items() if CPU in v.times}
    versions: dict[str, str] = {}
    losses: dict[str, list[float]] = {}  # of the first steps, which are the same for all
    try:
        everything = [*systems.items(), *small.items()]
        with ThreadPoolExecutor(len(everything)) as pool:
            asked = pool.map(lambda entry: entry[1].ask("passes", count=COMPARED), everything)
            for (name, system), replies in zip(everything, asked, strict=True):
                say(f"{name}: {system.reason or 'started'}")
                if replies is not None and system is systems.get(name):
                    losses[name] = replies[-1]["losses"]
        for index in range(rounds):
            turn = index % len(systems)
            order = [*systems][turn:] + [*systems][:turn]
            for case, do in ((passes, "passes"), (step, "steps")):
                for name in order:
                    if case.name not in variants[name].times:
                        continue
                    replies = systems[name].ask(do, count=1 + steps)
                    if replies is None:
                        case.samples[name] = systems[name].reason
                        continue
                    case.add(name, _milliseconds(replies))
                    case.losses[name] = losses[name]
                    versions |= systems[name].started
                    say(f"round {index + 1}, {case.name}: {name} {case.samples[name][-1]:.1f} ms")
            for name, system in small.items():
                value = _microseconds(system, TINY, steps)
                if value is None:
                    cpu.samples[name] = system.reason
                else:
                    cpu.add(name, value)
                    say(f"round {index + 1}, {cpu.name}: {name} {value:.0f} us")
            if OURS in systems:
                _bubble(systems[OURS], work, steps, span, idle)
            yield {
                "cases": [case.data() for case in (passes, step, cpu, span, idle)],
                "versions": versions,
                "settings": {"rounds": rounds, "steps": steps, "threads": 1},
            }
    finally:
        for system in (*systems.values(), *small.values()):
            system.close()


def _system(variant: Variant, work: PipeWork) -> System:
    work = dataclasses.replace(work, stages=variant.stages)
    return System(
        ["benchmarks.pipe_worker", variant.module],
        variant.interpreter,
        variant.stages,
        start={"work": dataclasses.asdict(work), "options": dict(variant.options)},
    )


def _milliseconds(replies: Replies) -> float:
    each = list(zip(*(reply["seconds"] for reply in replies), strict=True))[1:]
    return median(max(ranks) for ranks in each) * 1e3


def _microseconds(system: System, work: PipeWork, steps: int) -> float | None:
    """Of a forward or backward, with the transfer that follows it."""
    count = 5 * steps
    together, alone = (system.ask(do, count=count) for do in ("passes", "alone"))
    if together is None or alone is None:
        return None
    extra = [
        median(a["cpu_seconds"]) - median(b["cpu_seconds"])
        for a, b in zip(together, alone, strict=True)
    ]
    return mean(extra) / (2 * work.micro_batches) * 1e6


def _bubble(system: System, work: PipeWork, steps: int, span: Case, idle: Case) -> None:
    """One sample of each kind: measured, and simulated for the costs of this moment."""
    stamped, costs = system.ask("stamps", count=1 + steps), system.ask("costs", repeats=3)
    if stamped is None or costs is None:
        for case, kind in ((c, k) for c in (span, idle) for k in (MEASURED, BY_LAYERS, BY_ACTIONS)):
            case.samples[kind] = system.reason
        return
    batches = list(zip(*(reply["batches"] for reply in stamped), strict=True))[1:]
    length, share, seconds = map(list, zip(*map(_measured, batches), strict=True))
    middle = sorted(range(len(length)), key=length.__getitem__)[len(length) // 2]
    span.add(MEASURED, length[middle] * 1e3)
    idle.add(MEASURED, share[middle] * 100)
    for kind, both in ((BY_ACTIONS, seconds[middle]), (BY_LAYERS, _by_layers(costs, work))):
        found = simulate(make_schedule("1f1b", work.stages, work.micro_batches, 1), _costs(both))
        span.add(kind, found.makespan * 1e3)
        idle.add(kind, found.bubble_fraction * 100)


Both = tuple[list[float], list[float]]
"""Seconds of forward and of backward, by stage."""


def _costs(both: Both) -> Costs:
    forward, backward = both
    nothing = (0.0,) * len(forward)
    return Costs(tuple(forward), tuple(backward), nothing, nothing, nothing[1:], nothing[1:])


def _by_layers(replies: Replies, work: PipeWork) -> Both:
    """The layers of a stage together; the loss is the last stage's."""
    each = (work.layers + 2) // work.stages
    stages = [
        replies[stage]["layers"][stage * each : (stage + 1) * each + (stage == work.stages - 1)]
        for stage in range(work.stages)
    ]
    forward, backward = ([sum(cost[i] for cost in part) for part in stages] for i in range(2))
    return forward, backward


def _measured(ranks: tuple[dict[str, Any], ...]) -> tuple[float, float, Both]:
    """Of one batch: seconds from the barrier to the last action's end, the share of it that the
    ranks did not spend in actions, and an action's mean seconds."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank in ranks:
        for kind, stage, begin, end in rank["stamps"]:
            times[stage, kind].append(end - begin)
    last = max(end for rank in ranks for *_, end in rank["stamps"])
    length = last - min(rank["begin"] for rank in ranks)
    busy = sum(map(sum, times.values()))
    stages = range(len(ranks))
    forward, backward = ([mean(times[s, kind]) for s in stages] for kind in ("FORWARD", "BACKWARD"))
    return length, 1 - busy / (length * len(ranks)), (forward, backward)
