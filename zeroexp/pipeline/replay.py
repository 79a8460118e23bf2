"""Runs a schedule's lists against each other on a clock, or finds where they block.

Every rank goes through its list in order. A compute action starts when its rank is free and its
inputs are there. What is between ranks is read in one of two ways:

* data flow: a result arrives ``delay`` after it was made, sends and receives take no time of the
  ranks (transfers that run beside compute);
* rendezvous: a send and its receive hold both ranks until both are there, and ``delay`` longer.
  This is the strictest meaning that a backend can give to blocking transfers: what passes here
  runs anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from zeroexp.pipeline.action import Action, Exchange, Kind, actions_of
from zeroexp.pipeline.schedule import Schedule

Result = tuple[bool, int, int | None]
"""(is it a gradient?, stage, micro-batch): the output of a stage, or the gradient of its input."""


@dataclass(frozen=True)
class Wait:
    """Rank ``rank`` stands at ``position`` with ``action`` until rank ``on`` runs ``missing``."""

    rank: int
    position: int
    action: Action
    on: int
    missing: Action


@dataclass(frozen=True)
class Replay:
    """``times[r][i]`` is (start, end) of entry i of rank r; ``waits`` holds the ranks that never
    came to their end."""

    times: list[list[tuple[float, float]]]
    waits: dict[int, Wait]


def needs(action: Action, num_stages: int) -> tuple[Result, ...]:
    """The results that a compute action reads."""
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return ((False, stage - 1, m),) if stage else ()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return ((True, stage, m),)
    if stage == num_stages - 1:
        return ((False, stage, m),)
    return ((False, stage, m), (True, stage + 1, m))


def result_of(action: Action) -> Result | None:
    """What a compute action makes that another one reads; None for weight gradients."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return (action.kind is not Kind.FORWARD, action.stage, action.micro_batch)


def replay(
    schedule: Schedule,
    duration: Callable[[Action], float],
    delay: Callable[[int], float],
    *,
    rendezvous: bool = False,
) -> Replay:
    """Replay ``schedule``; ``duration`` of a compute action, ``delay`` between stage s and s+1."""
    ranks = range(schedule.num_ranks)
    times: list[list[tuple[float, float]]] = [[] for _ in ranks]
    clock: list[float] = [0 for _ in ranks]
    made: dict[Result, float] = {}
    posted: dict[Action, float] = {}
    waiting: dict[Result | Action, list[int]] = {}
    ready = deque(ranks)

    def run(rank: int, action: Action) -> float | None:
        """End of a compute action, None while an input is missing."""
        start = clock[rank]
        for need in needs(action, schedule.num_stages):
            if need not in made:
                waiting.setdefault(need, []).append(rank)
                return None
            far = schedule.rank_of[need[1]] != rank and not rendezvous
            arrival = made[need] + (delay(min(need[1], action.stage)) if far else 0)
            start = max(start, arrival)
        clock[rank] = start
        end = start + duration(action)
        result = result_of(action)
        if result is not None:
            made[result] = end
            ready.extend(waiting.pop(result, ()))
        return end

    def meet(rank: int, actions: tuple[Action, ...]) -> float | None:
        """End of transfers that start together, None while a peer is not there."""
        for action in actions:
            if action not in posted:
                posted[action] = clock[rank]
                ready.extend(waiting.pop(action, ()))
        end = clock[rank]
        for action in actions:
            other = action.counterpart
            if other not in posted:
                waiting.setdefault(other, []).append(rank)
                return None
            boundary = min(action.stage, action.peer_stage)
            end = max(end, max(posted[action], posted[other]) + delay(boundary))
        return end

    while ready:
        rank = ready.popleft()
        entries = schedule.lists[rank]
        while len(times[rank]) < len(entries):
            entry = entries[len(times[rank])]
            if isinstance(entry, Exchange) or entry.is_transfer:
                end = meet(rank, actions_of(entry)) if rendezvous else clock[rank]
            elif entry.is_compute:
                end = run(rank, entry)
            else:
                end = clock[rank]
            if end is None:
                break
            times[rank].append((clock[rank], end))
            clock[rank] = end
    return Replay(times, _waits(schedule, times, made, posted))


def _waits(
    schedule: Schedule,
    times: list[list[tuple[float, float]]],
    made: dict[Result, float],
    posted: dict[Action, float],
) -> dict[int, Wait]:
    waits = {}
    for rank, entries in enumerate(schedule.lists):
        position = len(times[rank])
        if position == len(entries):
            continue
        for action in actions_of(entries[position]):
            if action.is_transfer:
                missing = action.counterpart
                absent = missing not in posted
            else:
                open_needs = [n for n in needs(action, schedule.num_stages) if n not in made]
                absent = bool(open_needs)
                missing = _maker(schedule, open_needs[0]) if absent else action
            if absent:
                on = schedule.rank_of[missing.stage]
                waits[rank] = Wait(rank, position, action, on, missing)
                break
    return waits


def _maker(schedule: Schedule, result: Result) -> Action:
    """The action that makes ``result``: whole or first half of a backward, as the list has it."""
    gradient, stage, m = result
    if not gradient:
        return Action(Kind.FORWARD, stage, m)
    half = Action(Kind.BACKWARD_INPUT, stage, m)
    held = any(action == half for _, action in schedule.actions(schedule.rank_of[stage]))
    return half if held else Action(Kind.BACKWARD, stage, m)
