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

from benchmarks import peer_env
from benchmarks.machine import ROOT
from benchmarks.pair import Pair, PairFailed
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
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedules import make_schedule
from zeroexp.pipeline.simulate import simulate

TINY = PipeWork(vocab=64, context=16, dim=16, layers=6, heads=1, samples=1, length=8)
"""Layers that take next to nothing."""

COMPARED = 3
"""Steps whose losses must agree."""

Replies = list[dict[str, Any]]


class System:
    """The processes of one variant on one work; a failure ends it for the rest of the run."""

    def __init__(self, variant: Variant, work: PipeWork) -> None:
        self._variant = variant
        self._work = dataclasses.replace(work, stages=variant.stages)
        self._pair: Pair | None = None
        self.reason: str | None = None
        self.versions: dict[str, str] = {}
        self.losses: list[float] = []
        """Of its first steps, which are those of every other system too."""
        if variant.interpreter == "peers" and not peer_env.exists():
            self.reason = "no environment for it: python -m benchmarks peers"

    def _started(self) -> Pair:
        if self._pair is None:
            variant = self._variant
            self._pair = Pair(
                ["benchmarks.pipe_worker", variant.module],
                variant.interpreter,
                variant.stages,
                threads=1,
                disk=ROOT / "build",
            )
            start = {"work": dataclasses.asdict(self._work), "options": dict(variant.options)}
            self.versions = self._pair.ask("start", timeout=1800.0, **start)[0]
        return self._pair

    def ask(self, do: str, **arguments: int) -> Replies | None:
        """The replies of all ranks; None where there is a ``reason``."""
        if self.reason is not None:
            return None
        try:
            return self._started().ask(do, **arguments)
        except PairFailed as failure:
            self.reason = str(failure)
            self.close()
            return None

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None


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
    systems = {name: System(variant, work) for name, variant in variants.items()}
    small = {name: System(v, TINY) for name, v in variants.items() if CPU in v.times}
    versions: dict[str, str] = {}
    try:
        everything = [*systems.items(), *small.items()]
        with ThreadPoolExecutor(len(everything)) as pool:
            for name, reason in pool.map(_started, everything):
                say(f"{name}: {reason or 'started'}")
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
                    case.losses[name] = systems[name].losses
                    versions |= systems[name].versions
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


def _started(entry: tuple[str, System]) -> tuple[str, str | None]:
    """Its name, and why it does not run."""
    name, system = entry
    replies = system.ask("passes", count=COMPARED)
    if replies is not None:
        system.losses = replies[-1]["losses"]
    return name, system.reason


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
