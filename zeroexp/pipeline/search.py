"""Schedules found for given costs: a list scheduler, and a search that improves any schedule.

The tables of zero-bubble schedules are made for F = I = W; with other costs, and with uneven
stages, a search finds better ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from zeroexp.pipeline.action import Action, Kind
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.replay import replay
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.simulate import Simulation, measured, simulate
from zeroexp.pipeline.transfers import without_transfers

LISTED = "listed"
"""The name of schedules that the list scheduler gives."""

_PRIORITY = (Kind.BACKWARD_INPUT, Kind.FORWARD, Kind.BACKWARD_WEIGHT)


def list_schedule(
    rank_of: Sequence[int],
    micro_batches: int,
    costs: Costs,
    limit: Sequence[float],
    *,
    in_bytes: bool = False,
    reluctance: float = 0,
) -> Schedule | None:
    """What can start first is run first: input gradients before forwards before weight gradients.

    ``limit``: per rank the most activations alive, in micro-batches of the rank's share, or in
    bytes. A forward waits while it would pass it. A weight gradient gives way to what can start up
    to ``reluctance`` of its own duration later. None if the limit is below one micro-batch.
    """
    return _ListScheduler(tuple(rank_of), micro_batches, costs, limit, in_bytes, reluctance).run()


class _ListScheduler:
    def __init__(
        self,
        rank_of: tuple[int, ...],
        micro_batches: int,
        costs: Costs,
        limit: Sequence[float],
        in_bytes: bool,
        reluctance: float,
    ) -> None:
        self.rank_of, self.m, self.costs, self.limit = rank_of, micro_batches, costs, limit
        stages, ranks = len(rank_of), max(rank_of) + 1
        self.stages_of = [[s for s in range(stages) if rank_of[s] == r] for r in range(ranks)]
        self.size = [
            costs.activations[s] if in_bytes else 1 / len(self.stages_of[rank_of[s]])
            for s in range(stages)
        ]
        # A forward leaves room for the rank's later stages of one micro-batch: else early forwards
        # could fill a rank, and none of them would ever come to its backward.
        self.room = [
            self.size[s] + sum(self.size[t] for t in self.stages_of[rank_of[s]] if t > s)
            for s in range(stages)
        ]
        self.patience = [reluctance * duration for duration in costs.weight_grad]
        self.next = {(kind, s): 0 for kind in _PRIORITY for s in range(stages)}
        self.clock: list[float] = [0.0] * ranks
        self.moment = 1e-9 * self.m * sum(costs.forward + costs.input_grad + costs.weight_grad)
        self.alive = [0.0] * ranks
        self.forward_end: dict[tuple[int, int], float] = {}
        self.gradient_end: dict[tuple[int, int], float] = {}

    def run(self) -> Schedule | None:
        lists: list[list[Action]] = [[] for _ in self.clock]
        # What each rank would do next; only neighbours of what was done can change their mind.
        chosen = [self._next_of(rank) for rank in range(len(self.clock))]
        for _ in range(3 * self.m * len(self.rank_of)):
            found = min((x for x in chosen if x is not None), default=None)
            if found is None:
                return None
            _, rank, stage, kind = found
            lists[rank].append(self._do(rank, stage, kind))
            ends = range(max(0, stage - 1), min(len(self.rank_of), stage + 2))
            for neighbour in {self.rank_of[s] for s in ends}:
                chosen[neighbour] = self._next_of(neighbour)
        return Schedule(LISTED, self.rank_of, self.m, tuple(map(tuple, lists)))

    def _next_of(self, rank: int) -> tuple[float, int, int, Kind] | None:
        starts = [
            (start + (self.patience[stage] if kind is _PRIORITY[-1] else 0), priority, -stage, kind)
            for stage in self.stages_of[rank]
            for priority, kind in enumerate(_PRIORITY)
            if (start := self._start(rank, stage, kind)) is not None
        ]
        if not starts:
            return None
        # Sums of the same costs in another order differ in the last bit and are one moment. Later
        # stages first among equals of one kind: they are nearer to a backward.
        first = min(starts)[0]
        start, _, stage, kind = min(
            (found for found in starts if found[0] <= first + self.moment),
            key=lambda found: found[1:3],
        )
        return start, rank, -stage, kind

    def _start(self, rank: int, stage: int, kind: Kind) -> float | None:
        m = self.next[kind, stage]
        if m == self.m:
            return None
        ready: float | None = 0.0
        if kind is Kind.FORWARD:
            if self.alive[rank] + self.room[stage] > self.limit[rank] * (1 + 1e-9):
                return None
            if stage:
                ready = self._arrival(self.forward_end, stage - 1, stage, m)
        elif kind is Kind.BACKWARD_INPUT:
            if m >= self.next[Kind.FORWARD, stage]:
                return None
            if stage < len(self.rank_of) - 1:
                ready = self._arrival(self.gradient_end, stage + 1, stage, m)
        elif m >= self.next[Kind.BACKWARD_INPUT, stage]:
            return None
        return None if ready is None else max(self.clock[rank], ready)

    def _arrival(
        self, ends: dict[tuple[int, int], float], source: int, target: int, m: int
    ) -> float | None:
        end = ends.get((source, m))
        if end is None or self.rank_of[source] == self.rank_of[target]:
            return end
        return end + self.costs.transfer[min(source, target)]

    def _do(self, rank: int, stage: int, kind: Kind) -> Action:
        m = self.next[kind, stage]
        start = self._start(rank, stage, kind) or 0.0
        self.next[kind, stage] = m + 1
        action = Action(kind, stage, m)
        self.clock[rank] = end = start + self.costs.duration(action)
        size, kept = self.size[stage], self.costs.kept
        if kind is Kind.FORWARD:
            self.forward_end[stage, m] = end
            self.alive[rank] += size
        elif kind is Kind.BACKWARD_INPUT:
            self.gradient_end[stage, m] = end
            self.alive[rank] -= size * (1 - kept)
        else:
            self.alive[rank] -= size * kept
        return action


def improve(
    schedule: Schedule,
    costs: Costs,
    limit: float | None = None,
    *,
    trials: int = 400,
    seed: int = 0,
) -> Simulation:
    """Move single actions within their rank's list and keep what does not lengthen the step.

    ``limit`` is the most bytes of activations per rank. The result is valid, never slower than
    ``schedule`` and depends on the arguments alone. One trial replays the whole schedule.
    """
    best = simulate(without_transfers(schedule), costs)
    draw = random.Random(seed)
    lists = [list(entries) for entries in best.schedule.lists]
    for _ in range(trials):
        rank = draw.randrange(len(lists))
        actions = lists[rank]
        if len(actions) < 2:
            continue
        source = draw.randrange(len(actions))
        # Near moves are tried more often: far ones break an order that the rest relies on.
        distance = min(len(actions) - 1, 1 + int(draw.expovariate(0.4)))
        target = source + draw.choice((-distance, distance))
        if not 0 <= target < len(actions):
            continue
        moved = [*actions]
        moved.insert(target, moved.pop(source))
        candidate = best.schedule.with_lists([*lists[:rank], moved, *lists[rank + 1 :]])
        found = _tried(candidate, costs, limit, best.makespan)
        # An equal step with less idling inside a rank's work is a better place to go on from.
        if found is not None and _rank_key(found) <= _rank_key(best):
            best, lists[rank] = found, moved
    return best


def _rank_key(simulation: Simulation) -> tuple[float, float]:
    return simulation.makespan, sum(simulation.bubble)


def _tried(
    schedule: Schedule, costs: Costs, limit: float | None, longest: float
) -> Simulation | None:
    """The figures of a rearranged list; None if it blocks, holds too much or takes longer. A move
    keeps a valid list complete, and an action that came before what it needs makes the replay wait
    for ever."""
    run = replay(schedule, costs.duration, costs.transfer.__getitem__)
    if run.waits or max(times[-1][1] for times in run.times) > longest:
        return None
    found = measured(schedule, costs, run)
    return None if limit is not None and max(found.peak_bytes) > limit else found
