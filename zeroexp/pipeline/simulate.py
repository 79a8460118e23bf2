"""The clock, memory and bytes of a schedule, by replaying its lists with given costs."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import SENDS, Action, Kind
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.replay import Replay, replay
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.validate import validate


@dataclass(frozen=True)
class Timed:
    """A compute action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs. Lists have one value per rank; times are in the unit of the costs.

    ``makespan`` runs from the step's begin to the last action's end, ``span`` of a rank from its
    first to its last action. ``peak_in_flight`` counts (stage, micro-batch) pairs with a forward
    and an unfinished backward; ``peak_activations`` is the same in micro-batches of the rank's
    whole share of the model, with the part that an input gradient frees taken off; ``peak_bytes``
    in bytes. ``sends`` and ``sent_bytes`` count what the rank sends to others.
    """

    schedule: Schedule
    costs: Costs
    timeline: tuple[tuple[Timed, ...], ...]
    makespan: float
    span: tuple[float, ...]
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_activations: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    sends: tuple[int, ...]
    sent_bytes: tuple[float, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of the step in which a rank does not compute: fill, gaps and drain."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Gaps between a rank's own first and last action: what the zero-bubble papers call bubble.
        The fill before the first action is not in it, and remains for every schedule."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        total = self.makespan * len(self.busy)
        return sum(self.idle) / total if total else 0.0


def simulate(schedule: Schedule, costs: Costs, *, blocking: bool = False) -> Simulation:
    """Replay a schedule. Raises :class:`zeroexp.errors.ScheduleError` if it is not valid.

    Transfers run beside compute unless ``blocking``: then sends and receives, which the lists must
    have, hold both ranks (the worst that a backend can do).
    """
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.num_stages} stages, the costs are those of "
            f"{costs.num_stages}"
        )
    validate(schedule, transfers=True if blocking else None)
    return measured(
        schedule,
        costs,
        replay(schedule, costs.duration, costs.transfer.__getitem__, rendezvous=blocking),
    )


def measured(schedule: Schedule, costs: Costs, run: Replay) -> Simulation:
    """The figures of a replay that came to its end."""
    timeline = []
    for entries, times in zip(schedule.lists, run.times, strict=True):
        timeline.append(
            tuple(
                Timed(entry, start, end)
                for entry, (start, end) in zip(entries, times, strict=True)
                if isinstance(entry, Action) and entry.is_compute
            )
        )
    peaks = [_peaks(schedule, costs, rank) for rank in range(schedule.num_ranks)]
    sends = [_sends(schedule, rank) for rank in range(schedule.num_ranks)]
    return Simulation(
        schedule,
        costs,
        tuple(timeline),
        makespan=max((times[-1][1] for times in run.times if times), default=0),
        span=tuple(line[-1].end - line[0].start if line else 0 for line in timeline),
        busy=tuple(sum(costs.duration(t.action) for t in line) for line in timeline),
        peak_in_flight=tuple(peak[0] for peak in peaks),
        peak_activations=tuple(peak[1] for peak in peaks),
        peak_bytes=tuple(peak[2] for peak in peaks),
        sends=tuple(map(len, sends)),
        sent_bytes=tuple(sum(costs.sent[boundary] for boundary in sent) for sent in sends),
    )


def _peaks(schedule: Schedule, costs: Costs, rank: int) -> tuple[int, float, float]:
    """Peaks of a rank. Its list alone decides them: what it runs in order, it holds in order."""
    held = len(schedule.stages_of(rank))
    whole = dict.fromkeys(schedule.stages_of(rank), 0)
    half = dict(whole)
    in_flight, activations, size = 0, 0.0, 0.0
    for _, action in schedule.actions(rank):
        stage = action.stage
        if action.kind is Kind.FORWARD:
            whole[stage] += 1
        elif action.kind is Kind.BACKWARD:
            whole[stage] -= 1
        elif action.kind is Kind.BACKWARD_INPUT:
            whole[stage] -= 1
            half[stage] += 1
        elif action.kind is Kind.BACKWARD_WEIGHT:
            half[stage] -= 1
        else:
            continue
        full, partly = sum(whole.values()), sum(half.values())
        in_flight = max(in_flight, full + partly)
        activations = max(activations, (full + costs.kept * partly) / held)
        size = max(
            size, sum(costs.activations[s] * (whole[s] + costs.kept * half[s]) for s in whole)
        )
    return in_flight, activations, size


def _sends(schedule: Schedule, rank: int) -> list[int]:
    """The boundary of every tensor that a rank sends, whether or not the list has its sends."""
    if schedule.has_transfers:
        actions = [a for _, a in schedule.actions(rank) if a.kind in SENDS]
        return [min(a.stage, a.peer_stage) for a in actions]
    ranks = schedule.rank_of
    last = schedule.num_stages - 1
    sent = []
    for _, action in schedule.actions(rank):
        s = action.stage
        if action.kind is Kind.FORWARD and s < last and ranks[s + 1] != rank:
            sent.append(s)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and s and ranks[s - 1] != rank:
            sent.append(s - 1)
    return sent
