"""Writes sends and receives into lists of compute actions, in an order that cannot deadlock.

The compute actions run on a clock once; that puts all actions and all transfers of all ranks into
one sequence, each transfer standing where its tensor is made. Every rank gets its part of that one
sequence. Then the first event of the sequence that has not happened always can: whoever takes part
in it has nothing left to do before it. So no ranks can wait in a circle, even if a send holds its
rank until the receive is there and the receive until the send is.

Transfers between two ranks that stand next to each other in both lists are one :class:`Exchange`:
in 1F1B's steady state an activation and a gradient cross at the same time, and one after the other
they would take twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeroexp.pipeline.action import Action, Entry, Exchange, Kind, actions_of
from zeroexp.pipeline.replay import replay
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.validate import validate

# Integers, so that what happens at the same time compares equal; none is 0: an action starts before
# its result is sent. The same for all stages on purpose: ranks in step wait least for each other
# where transfers block, also when their real durations differ a little.
_DURATION = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}


@dataclass
class _Meeting:
    """Transfers between two ranks that happen together; ``sends`` has one from each at most."""

    sends: dict[int, Action]


def with_transfers(schedule: Schedule) -> Schedule:
    """The same schedule with sends and receives; those that it had are replaced.

    Raises :class:`zeroexp.errors.ScheduleError` if the compute actions are not valid.
    """
    schedule = without_transfers(schedule)
    validate(schedule, transfers=False)
    lists: list[list[Entry | _Meeting]] = [[] for _ in schedule.lists]
    for rank, action in _sequence(schedule):
        if not action.is_transfer:
            lists[rank].append(action)
            continue
        peer = schedule.rank_of[action.peer_stage]
        ours, theirs = (lists[r][-1] if lists[r] else None for r in (rank, peer))
        if isinstance(ours, _Meeting) and ours is theirs and rank not in ours.sends:
            ours.sends[rank] = action
            continue
        meeting = _Meeting({rank: action})
        lists[rank].append(meeting)
        lists[peer].append(meeting)
    return schedule.with_lists(
        [[_entry(entry, rank) for entry in entries] for rank, entries in enumerate(lists)]
    )


def without_transfers(schedule: Schedule) -> Schedule:
    """The same schedule without its sends and receives."""
    return schedule.with_lists(
        [
            [entry for entry in entries if not any(a.is_transfer for a in actions_of(entry))]
            for entries in schedule.lists
        ]
    )


def _sequence(schedule: Schedule) -> Iterable[tuple[int, Action]]:
    """(rank, action) of everything; a transfer by its send, on the rank that sends."""
    times = replay(schedule, lambda action: _DURATION.get(action.kind, 0), lambda _: 0).times
    # At the same time: transfers of what is ready before what starts. Those of a pair of ranks
    # stand together.
    events: list[tuple[tuple[float, ...], int, Action]] = []
    last = schedule.num_stages - 1
    for rank, entries in enumerate(schedule.lists):
        for position, (entry, (start, end)) in enumerate(zip(entries, times[rank], strict=True)):
            for action in actions_of(entry):
                events.append(((start, 1, rank, position), rank, action))
                send = _send_of(action, last)
                if send is not None:
                    peer = schedule.rank_of[send.peer_stage]
                    if peer != rank:
                        pair = (min(rank, peer), max(rank, peer))
                        events.append(((end, 0, *pair, rank, position), rank, send))
    return [(rank, action) for _, rank, action in sorted(events, key=lambda event: event[0])]


def _send_of(action: Action, last: int) -> Action | None:
    """The send of what a compute action makes, if another stage reads it."""
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD and stage < last:
        return Action(Kind.SEND_ACTIVATION, stage, m)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage:
        return Action(Kind.SEND_GRADIENT, stage, m)
    return None


def _entry(entry: Entry | _Meeting, rank: int) -> Entry:
    if not isinstance(entry, _Meeting):
        return entry
    actions = [send if sender == rank else send.counterpart for sender, send in entry.sends.items()]
    return actions[0] if len(actions) == 1 else Exchange(tuple(actions))
