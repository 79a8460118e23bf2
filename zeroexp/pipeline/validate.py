"""Proves a schedule complete, in order and free of deadlock, or names the action that breaks."""

from __future__ import annotations

from typing import NoReturn

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import MARKERS, SENDS, Action, Exchange, Kind
from zeroexp.pipeline.replay import Wait, replay
from zeroexp.pipeline.schedule import Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class _Index:
    """Where every action of a schedule stands: action -> (rank, position)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.where: dict[Action, tuple[int, int]] = {}

    def fail(self, rank: int, position: int, action: Action, problem: str) -> NoReturn:
        raise ScheduleError(
            f"schedule {self.schedule.name}: rank {rank}, position {position}, {action}: {problem}",
            rank=rank,
            position=position,
            action=str(action),
        )

    def missing(self, action: Action, why: str) -> NoReturn:
        rank = self.schedule.rank_of[action.stage]
        self.fail(rank, len(self.schedule.lists[rank]), action, f"is not in the list; {why}")

    def after(self, action: Action, needed: Action) -> None:
        """``action`` stands later than ``needed``, which is in the same rank's list."""
        rank, position = self.where[action]
        _, other = self.where[needed]
        if position <= other:
            self.fail(rank, position, action, f"needs {needed}, which comes at position {other}")


def validate(schedule: Schedule, *, transfers: bool | None = None) -> None:
    """Raise :class:`ScheduleError` unless every stage runs every micro-batch's forward and backward
    (whole, or both halves) once, after what it needs, and the ranks cannot block each other.

    ``transfers``: whether sends and receives are part of the lists; None asks the lists. With them,
    each result crosses to the next rank once, the k-th send of a rank to another is the other's
    k-th receive, and no order of blocking sends and receives can stop. Without them, results are
    taken to arrive by themselves.
    """
    with_transfers = schedule.has_transfers if transfers is None else transfers
    index = _Index(schedule)
    _check_places(index)
    _check_complete(index)
    if with_transfers:
        _check_transfers(index)
    _check_order(index, with_transfers)
    if with_transfers:
        _check_channels(index)
    _check_markers(index)
    _check_progress(index, with_transfers)


def _check_places(index: _Index) -> None:
    schedule = index.schedule
    for rank in range(schedule.num_ranks):
        for position, entry in enumerate(schedule.lists[rank]):
            for action in entry.actions if isinstance(entry, Exchange) else ():
                if not action.is_transfer:
                    index.fail(rank, position, action, "an exchange is of sends and receives")
        for position, action in schedule.actions(rank):

            def fail(
                problem: str, rank: int = rank, position: int = position, action: Action = action
            ) -> NoReturn:
                index.fail(rank, position, action, problem)

            stage, m = action.stage, action.micro_batch
            if not 0 <= stage < schedule.num_stages:
                fail(f"there are {schedule.num_stages} stages, counted from 0")
            if schedule.rank_of[stage] != rank:
                fail(f"stage {stage} is on rank {schedule.rank_of[stage]}")
            if action.kind in MARKERS:
                if m is not None:
                    fail("concerns a whole stage and has no micro-batch")
                continue
            if m is None or not 0 <= m < schedule.micro_batches:
                fail(f"there are {schedule.micro_batches} micro-batches, counted from 0")
            if action in index.where:
                fail(f"is at position {index.where[action][1]} already")
            index.where[action] = (rank, position)


def _check_complete(index: _Index) -> None:
    schedule = index.schedule
    for stage in range(schedule.num_stages):
        for m in range(schedule.micro_batches):
            forward = Action(Kind.FORWARD, stage, m)
            if forward not in index.where:
                index.missing(forward, "every stage runs every micro-batch once")
            whole, first, second = (Action(kind, stage, m) for kind in _BACKWARDS)
            halves = [half for half in (first, second) if half in index.where]
            if whole in index.where and halves:
                later = max((whole, *halves), key=lambda action: index.where[action][1])
                others = " and ".join(str(a) for a in (whole, *halves) if a is not later)
                index.fail(*index.where[later], later, f"repeats a backward done by {others}")
            if whole in index.where:
                continue
            if not halves:
                index.missing(whole, "every forward has a backward")
            if first not in index.where:
                index.missing(first, f"{second} is half of a backward")
            if second not in index.where:
                index.missing(second, f"{first} is half of a backward")


def _gradient_maker(index: _Index, stage: int, m: int) -> Action:
    whole = Action(Kind.BACKWARD, stage, m)
    return whole if whole in index.where else Action(Kind.BACKWARD_INPUT, stage, m)


def _check_transfers(index: _Index) -> None:
    """Each result that another rank reads has one send and one receive, no other has any."""
    schedule = index.schedule
    wanted = set()
    for stage in range(schedule.num_stages - 1):
        if schedule.rank_of[stage] == schedule.rank_of[stage + 1]:
            continue
        for m in range(schedule.micro_batches):
            for send in (
                Action(Kind.SEND_ACTIVATION, stage, m),
                Action(Kind.SEND_GRADIENT, stage + 1, m),
            ):
                wanted |= {send, send.counterpart}
                for side, other in ((send, send.counterpart), (send.counterpart, send)):
                    if side not in index.where:
                        index.missing(side, f"{other} is its other side")
    for action, (rank, position) in index.where.items():
        if action.is_transfer and action not in wanted:
            index.fail(rank, position, action, "there is no other rank that needs it")


def _check_order(index: _Index, transfers: bool) -> None:
    """Within a rank's list everything comes after what it needs from that list."""
    schedule = index.schedule
    for action, (rank, _) in list(index.where.items()):
        stage, m = action.stage, int(action.micro_batch or 0)
        if action.kind is Kind.SEND_ACTIVATION:
            index.after(action, Action(Kind.FORWARD, stage, m))
        elif action.kind is Kind.SEND_GRADIENT:
            index.after(action, _gradient_maker(index, stage, m))
        elif action.kind is Kind.BACKWARD_WEIGHT:
            index.after(action, Action(Kind.BACKWARD_INPUT, stage, m))
        elif action.kind is Kind.FORWARD and stage:
            if schedule.rank_of[stage - 1] == rank:
                index.after(action, Action(Kind.FORWARD, stage - 1, m))
            elif transfers:
                index.after(action, Action(Kind.RECV_ACTIVATION, stage, m))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            index.after(action, Action(Kind.FORWARD, stage, m))
            if stage == schedule.num_stages - 1:
                continue
            if schedule.rank_of[stage + 1] == rank:
                index.after(action, _gradient_maker(index, stage + 1, m))
            elif transfers:
                index.after(action, Action(Kind.RECV_GRADIENT, stage, m))


def _check_channels(index: _Index) -> None:
    """What one rank sends another is received in the same order: backends match by order."""
    schedule = index.schedule
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank in range(schedule.num_ranks):
        for _, action in schedule.actions(rank):
            if action.is_transfer:
                peer = schedule.rank_of[action.peer_stage]
                if action.kind in SENDS:
                    sent.setdefault((rank, peer), []).append(action)
                else:
                    received.setdefault((peer, rank), []).append(action)
    for (source, target), sends in sent.items():
        pairs = zip(sends, received[source, target], strict=True)
        for number, (send, receive) in enumerate(pairs):
            if send.counterpart != receive:
                rank, position = index.where[receive]
                index.fail(
                    rank,
                    position,
                    receive,
                    f"is receive {number} of rank {target} from rank {source}, but send {number} "
                    f"there is {send} (position {index.where[send][1]})",
                )


def _check_markers(index: _Index) -> None:
    """Where stages are gathered and released, no action finds its stage sharded, and a stage's
    gradients are reduced once, when they are complete."""
    schedule = index.schedule
    for rank in range(schedule.num_ranks):
        actions = list(schedule.actions(rank))
        gathers = any(action.kind is Kind.UNSHARD for _, action in actions)
        reduces = any(action.kind is Kind.REDUCE_GRADS for _, action in actions)
        whole: set[int] = set()
        reduced: set[int] = set()
        last = {a.stage: i for i, a in actions if a.kind in _BACKWARDS}
        for position, action in actions:
            stage = action.stage
            if action.kind is Kind.UNSHARD:
                if stage in whole:
                    index.fail(rank, position, action, "the stage is whole already")
                whole.add(stage)
            elif action.kind is Kind.RESHARD:
                if stage not in whole:
                    index.fail(rank, position, action, "the stage is not whole")
                whole.remove(stage)
            elif action.kind is Kind.REDUCE_GRADS:
                if stage in reduced:
                    index.fail(rank, position, action, "the gradients were reduced before")
                if position < last.get(stage, -1):
                    index.fail(
                        rank, position, action, f"a backward follows at position {last[stage]}"
                    )
                reduced.add(stage)
            elif action.is_compute and gathers and stage not in whole:
                index.fail(rank, position, action, f"stage {stage} is not gathered at this point")
        if whole:
            stage = min(whole)
            index.missing(Action(Kind.RESHARD, stage), "the stage stays whole")
        for stage in schedule.stages_of(rank) if reduces else ():
            if stage not in reduced:
                index.missing(Action(Kind.REDUCE_GRADS, stage), "other stages are reduced")


def _check_progress(index: _Index, transfers: bool) -> None:
    waits = replay(index.schedule, lambda _: 0, lambda _: 0, rendezvous=transfers).waits
    if not waits:
        return
    seen: list[int] = []
    rank = min(waits)
    while rank not in seen:
        seen.append(rank)
        rank = waits[rank].on
    cycle = [waits[r] for r in seen[seen.index(rank) :]]
    first = cycle[0]
    index.fail(
        first.rank,
        first.position,
        first.action,
        "deadlock: " + "; ".join(_describe(wait) for wait in cycle),
    )


def _describe(wait: Wait) -> str:
    return (
        f"rank {wait.rank} at position {wait.position} ({wait.action}) waits for rank {wait.on} to "
        f"reach {wait.missing}"
    )
