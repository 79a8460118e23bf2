"""Runs a rank's list: every action, transfer and mark of a schedule, in the list's order.

Transfers never hold the rank where the list names them: a send copies and goes, a receive is opened
there (or earlier) and waited for where its value is used. A rank whose action fails tells the ranks
that wait for it, takes what is still on its way to it, and meets the others at the run's end, so
that every rank raises the first error and nobody hangs.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from zeroexp.errors import CollectiveTimeout, ModelError, RankMismatch, StageError, ZeroexpError
from zeroexp.pipeline.action import RECEIVES, SENDS, Action, Exchange, Kind
from zeroexp.pipeline.runtime.channel import Channel
from zeroexp.pipeline.runtime.forwards import forward_lists
from zeroexp.pipeline.runtime.lane import Inbox, Outbox, PeerFailed, Way
from zeroexp.pipeline.runtime.message import Message, describe
from zeroexp.pipeline.runtime.owner import Nobody, Owner
from zeroexp.pipeline.runtime.stage import Stage
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.transfers import with_transfers
from zeroexp.pipeline.validate import validate

Loss = Callable[[Any, Any], Tensor]
"""A micro-batch's mean loss from the last stage's output and its target."""

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Result:
    """``loss`` is the weighted mean over micro-batches, the same on every rank (None without a loss
    function); ``outputs`` the last stage's, on its rank after an evaluation."""

    loss: float | None
    outputs: list[Any] | None = None


@dataclass
class _Run:
    """What one run has in hand."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    seeds: list[float]
    weights: list[float]
    handed: dict[tuple[Way, int, int], Any]
    """Values between two stages of this rank: (way, boundary, micro-batch)."""
    losses: dict[int, Tensor]
    outputs: dict[int, Any]
    last_backward: dict[int, Action]
    training: bool = True


class Executor:
    """Runs this rank's part of ``schedule`` on its ``stages`` (those of ``schedule.stages_of``).

    A schedule without sends and receives gets them. ``loss(output, target)`` is needed on the last
    stage's rank. Collective over the channel. Raises :class:`ScheduleError` for a list that is not
    valid, :class:`ModelError` for stages that do not fit it or whose backward cannot be split as it
    asks, :class:`RankMismatch` where the ranks were given different schedules.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        channel: Channel,
        *,
        loss: Loss | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.channel = channel
        self.rank = channel.index
        self.stages = {stage.index: stage for stage in stages}
        self._loss = loss
        self._owner: Owner = owner or Nobody()
        self._last = schedule.num_stages - 1
        self.schedule = self._agreed(schedule)
        self._outboxes: dict[tuple[Way, int], Outbox] = {}
        self._inboxes: dict[tuple[Way, int], Inbox] = {}
        self._open_lanes()
        self._do: dict[Kind, Callable[[_Run, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: partial(self._send, Way.ACTIVATION),
            Kind.SEND_GRADIENT: partial(self._send, Way.GRADIENT),
            Kind.RECV_ACTIVATION: partial(self._recv, Way.ACTIVATION),
            Kind.RECV_GRADIENT: partial(self._recv, Way.GRADIENT),
            Kind.UNSHARD: lambda run, action: self._owner.unshard(action.stage),
            Kind.RESHARD: lambda run, action: self._owner.reshard(action.stage),
            Kind.REDUCE_GRADS: lambda run, action: self._owner.reduce_grads(action.stage),
        }
        self._plan = _flat(self.schedule.lists[self.rank])

    # -- construction ------------------------------------------------------------------------------

    def _agreed(self, schedule: Schedule) -> Schedule:
        """The schedule with its transfers, once every rank has found that it can run it."""
        problem: ZeroexpError | None = None
        try:
            if schedule.num_ranks > 1 and not schedule.has_transfers:
                schedule = with_transfers(schedule)
            validate(schedule)
            self._check(schedule)
        except ZeroexpError as error:
            problem = error
        lists = zlib.crc32(str(schedule).encode())
        said = [schedule.name, list(schedule.rank_of), schedule.micro_batches, lists]
        note = [*said, None if problem is None else str(problem)]
        notes = self.channel.exchange_notes(note, "the pipeline's schedule")
        if problem is not None:
            raise problem
        for rank, (*theirs, wrong) in enumerate(notes):
            if wrong is not None:
                raise ModelError(f"rank {self.channel.ranks[rank]}: {wrong}")
            if theirs != said:
                raise RankMismatch(
                    f"rank {self.channel.ranks[rank]} was given schedule {_named(theirs)}, rank "
                    f"{self._global_rank} {_named(said)}: give every rank the same"
                )
        return schedule

    def _check(self, schedule: Schedule) -> None:
        if schedule.num_ranks != self.channel.size:
            raise ModelError(
                f"schedule {schedule.name} is for {schedule.num_ranks} ranks, the channel has "
                f"{self.channel.size}"
            )
        held = list(schedule.stages_of(self.rank))
        if sorted(self.stages) != held:
            raise ModelError(
                f"rank {self.rank} of schedule {schedule.name} holds stages {held}, it was given "
                f"{sorted(self.stages)}"
            )
        for stage in self.stages.values():
            stage.refuse_if_empty()
        if self._last in self.stages and self._loss is None:
            raise ModelError(
                "the last stage needs a loss: Executor(..., loss=lambda output, target: ...)"
            )
        for _, action in schedule.actions(self.rank):
            if action.kind is Kind.BACKWARD_INPUT:
                self.stages[action.stage].refuse_what_cannot_split()

    def _open_lanes(self) -> None:
        ranks = self.schedule.rank_of
        for boundary in range(self._last):
            for way in Way:
                ends = (boundary, boundary + 1)
                source, target = ends if way is Way.ACTIVATION else ends[::-1]
                if ranks[source] == ranks[target]:
                    continue
                if ranks[source] == self.rank:
                    peer = ranks[target]
                    self._outboxes[way, boundary] = self.channel.outbox(boundary, way, peer)
                elif ranks[target] == self.rank:
                    device = self.stages[target].device
                    peer = ranks[source]
                    self._inboxes[way, boundary] = self.channel.inbox(boundary, way, peer, device)

    # -- running -----------------------------------------------------------------------------------

    def run(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        weights: Sequence[float] | None = None,
        divisor: float | None = None,
        scale: float = 1.0,
    ) -> Result:
        """Forward and backward of all micro-batches; gradients are added to the parameters'.

        ``inputs``: one value per micro-batch, needed on the first stage's rank; ``targets`` and
        ``weights`` (of each micro-batch's mean loss: its number of tokens, say; default: all equal)
        on the last stage's. Loss m is seeded with ``scale * weights[m] / divisor``; ``divisor`` is
        the sum of the weights unless the caller knows better (over data-parallel ranks, or 1 where
        somebody else divides).

        Raises :class:`StageError` on every rank when an action fails on any; gradients are then
        incomplete. The next run finds the channel at rest.
        """
        count = self.schedule.micro_batches
        run = _Run(inputs, targets, [], [], {}, {}, {}, self._last_backwards())
        for stage in self.stages.values():
            stage.forget()

        def prepare() -> None:
            self._take_batch(run, count, weights)
            total = sum(run.weights) if divisor is None else divisor
            run.seeds = [scale * weight / total for weight in run.weights]

        return self._carry_out(run, self._plan, prepare)

    def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        micro_batches: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> Result:
        """Forward only, of any number of micro-batches (default: those of the schedule).
        Without ``targets`` there is no loss."""
        count = self.schedule.micro_batches if micro_batches is None else micro_batches
        run = _Run(inputs, targets, [], [], {}, {}, {}, {}, training=False)
        entries = forward_lists(self.schedule.rank_of, count)[self.rank]
        return self._carry_out(run, entries, lambda: self._take_batch(run, count, weights))

    def _take_batch(self, run: _Run, count: int, weights: Sequence[float] | None) -> None:
        for what, values, stage in (
            ("inputs", run.inputs, 0),
            ("targets", run.targets, self._last),
        ):
            needed = stage in self.stages and (what == "inputs" or run.training)
            if values is None and needed:
                raise ModelError(f"stage {stage} needs the micro-batches' {what}")
            if values is not None and stage in self.stages and len(values) != count:
                raise ModelError(f"{len(values)} {what} were given for {count} micro-batches")
        if weights is not None and self._last in self.stages and len(weights) != count:
            raise ModelError(f"{len(weights)} weights were given for {count} micro-batches")
        run.weights = [1.0] * count if weights is None else [float(w) for w in weights]
        if self._last in self.stages and not sum(run.weights) > 0:
            raise ModelError(f"the weights of the micro-batches' losses sum to {sum(run.weights)}")

    def _carry_out(
        self, run: _Run, actions: Sequence[Action], prepare: Callable[[], None]
    ) -> Result:
        owed = Counter((action.kind, action.stage) for action in actions if action.is_transfer)
        for (way, boundary), outbox in self._outboxes.items():
            kind = Kind.SEND_ACTIVATION if way is Way.ACTIVATION else Kind.SEND_GRADIENT
            outbox.owed = owed[kind, boundary + (way is Way.GRADIENT)]
        for (way, boundary), inbox in self._inboxes.items():
            kind = Kind.RECV_ACTIVATION if way is Way.ACTIVATION else Kind.RECV_GRADIENT
            inbox.begin(owed[kind, boundary + (way is Way.ACTIVATION)])
        failure: dict[str, Any] | None = None
        cause: Exception | None = None
        action: Action | None = None
        try:
            prepare()
            for action in actions:
                self._do[action.kind](run, action)
        except PeerFailed:
            failure = {}
        except CollectiveTimeout:
            raise  # a rank is gone or elsewhere: there is nobody to agree with
        except Exception as error:
            cause = error
            failure = self._told(error, action)
        try:
            if failure is not None:
                self._give_up(actions)
            for outbox in self._outboxes.values():
                outbox.flush()
            rows = self.channel.exchange(self._row(run, failure), "end of the pipeline's run")
            notes = None
            if rows[:, 0].any():
                notes = self.channel.exchange_notes(failure, "errors of the pipeline's run")
        except CollectiveTimeout:
            if cause is None or not failure:
                raise
            notes = [failure]  # nobody to agree with, but this rank has an error of its own
        if notes is not None:
            raise self._first(notes) from self._own(notes, cause)
        return self._result(run, rows)

    def _give_up(self, actions: Sequence[Action]) -> None:
        """Tell who waits for this rank, and take what others still send it, in the list's order: in
        another one, a sender could wait for a message to be taken that comes later here."""
        for outbox in self._outboxes.values():
            outbox.fail()
        for stage in self.stages.values():
            stage.forget()
        self._owner.failed()
        lanes = [self._lane_in(action) for action in actions if action.kind in RECEIVES]
        to_come = Counter(lanes)
        for lane in lanes:
            inbox = self._inboxes[lane]
            if to_come[lane] <= inbox.owed:
                inbox.drain_next()
            to_come[lane] -= 1

    def _lane_in(self, action: Action) -> tuple[Way, int]:
        way = Way.ACTIVATION if action.kind is Kind.RECV_ACTIVATION else Way.GRADIENT
        return way, min(action.stage, action.peer_stage)

    def _told(self, error: Exception, action: Action | None) -> dict[str, Any]:
        where = f"{action}, stage {action.stage}" if action is not None else "start of the run"
        return {
            "at": time.time(),
            "text": f"rank {self.channel.ranks[self.rank]}, {where}: "
            f"{type(error).__name__}: {error}",
            "stage": None if action is None else action.stage,
            "action": None if action is None else str(action),
            "rank": self.channel.ranks[self.rank],
        }

    def _row(self, run: _Run, failure: dict[str, Any] | None) -> Tensor:
        """What all ranks tell each other at the end: (failed, loss, whether there is one)."""
        row = torch.zeros(3, dtype=torch.float64)
        if failure is not None:
            row[0] = 1
        elif run.losses:
            order = sorted(run.losses)
            losses = torch.stack([run.losses[m].reshape(()) for m in order]).double().cpu()
            share = torch.tensor([run.weights[m] for m in order], dtype=torch.float64)
            row[1], row[2] = (losses * share).sum() / share.sum(), 1
        return row

    def _result(self, run: _Run, rows: Tensor) -> Result:
        known = rows[rows[:, 2] > 0, 1]
        outputs = [run.outputs[m] for m in sorted(run.outputs)] if run.outputs else None
        return Result(float(known[0]) if known.numel() else None, outputs)

    def _first(self, notes: Sequence[dict[str, Any] | None]) -> StageError:
        """The earliest error of all ranks."""
        first = min((note for note in notes if note), key=lambda note: float(note["at"]))
        return StageError(
            first["text"], stage=first["stage"], action=first["action"], rank=first["rank"]
        )

    def _own(
        self, notes: Sequence[dict[str, Any] | None], cause: Exception | None
    ) -> Exception | None:
        return cause if self._first(notes).rank == self._global_rank else None

    @property
    def _global_rank(self) -> int:
        return self.channel.ranks[self.rank]

    def _last_backwards(self) -> dict[int, Action]:
        """For each stage the action that adds its last gradients."""
        return {
            action.stage: action
            for action in self._plan
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        }

    # -- actions -----------------------------------------------------------------------------------

    def _forward(self, run: _Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        given = (
            run.inputs[m]
            if s == 0 and run.inputs is not None
            else self._arrived(run, Way.ACTIVATION, s - 1, m)
        )
        if s == self._last:
            self._last_forward(run, given, m)
            return
        with self._owner.forward(s, m):
            if run.training:
                result = cast(Message, self.stages[s].forward(m, given))
            else:
                result = describe(self.stages[s].evaluate(given, None)[0])
        self._hand_on(run, Way.ACTIVATION, s, m, result)

    def _last_forward(self, run: _Run, given: Any, m: int) -> None:
        loss, target = self._loss, None
        if run.targets is not None:
            target = run.targets[m]
        loss_of = None
        if loss is not None and run.targets is not None:
            loss_of = partial(_with_target, loss, target)
        stage = self.stages[self._last]
        with self._owner.forward(self._last, m):
            if run.training:
                run.losses[m] = cast(Tensor, stage.forward(m, given, loss_of))
                return
            run.outputs[m], value = stage.evaluate(given, loss_of)
            if value is not None:
                run.losses[m] = value

    def _backward(self, run: _Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        grads = self._output_grads(run, s, m)
        with self._owner.backward(s, m, action.kind, run.last_backward[s] == action):
            back = self.stages[s].backward(m, grads)
        self._hand_back(run, s, m, back)

    def _backward_input(self, run: _Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        grads = self._output_grads(run, s, m)
        with self._owner.backward(s, m, action.kind, False):
            back = self.stages[s].backward_input(m, grads)
        self._hand_back(run, s, m, back)

    def _backward_weight(self, run: _Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        with self._owner.backward(s, m, action.kind, run.last_backward[s] == action):
            self.stages[s].backward_weight(m)

    def _output_grads(self, run: _Run, s: int, m: int) -> list[Tensor | None]:
        if s < self._last:
            structure, tensors = self._arrived(run, Way.GRADIENT, s, m)
            return [tensors[at] if kind == "t" else None for kind, at in structure.shape[1]]
        loss = run.losses[m]
        return [torch.full_like(loss, run.seeds[m])]

    def _hand_back(self, run: _Run, s: int, m: int, grads: list[Tensor | None]) -> None:
        if s:
            self._hand_on(run, Way.GRADIENT, s - 1, m, describe(grads))

    def _hand_on(self, run: _Run, way: Way, boundary: int, m: int, message: Message) -> None:
        """Keep a result until the list sends it, or the rank's other stage uses it."""
        if way is Way.ACTIVATION and (way, boundary) not in self._outboxes:
            # The next stage may change its input in place, this stage's graph may have saved it.
            structure, tensors = message
            message = Message(structure, [tensor.detach().clone() for tensor in tensors])
        run.handed[way, boundary, m] = message

    def _arrived(self, run: _Run, way: Way, boundary: int, m: int) -> Message:
        inbox = self._inboxes.get((way, boundary))
        if inbox is not None:
            return inbox.take(m)
        message: Message = run.handed.pop((way, boundary, m))
        return message

    def _send(self, way: Way, run: _Run, action: Action) -> None:
        m = _micro_batch(action)
        boundary = min(action.stage, action.peer_stage)
        structure, tensors = run.handed.pop((way, boundary, m))
        self._outboxes[way, boundary].send(structure, tensors, self._what(action))

    def _recv(self, way: Way, run: _Run, action: Action) -> None:
        boundary = min(action.stage, action.peer_stage)
        self._inboxes[way, boundary].expect(_micro_batch(action), self._what(action))

    def _what(self, action: Action) -> str:
        return f"pipeline {action} on rank {self._global_rank}"


def _named(said: Sequence[Any]) -> str:
    name, ranks, micro_batches, lists = said
    return f"{name} (stages on ranks {ranks}, {micro_batches} micro-batches, lists {lists:08x})"


def _flat(entries: Sequence[Any]) -> Sequence[Action]:
    """The actions of a list; in an exchange sends first, so that they are on their way while the
    receives are opened."""
    flat: list[Action] = []
    for entry in entries:
        if isinstance(entry, Exchange):
            flat += sorted(entry.actions, key=lambda action: action.kind not in SENDS)
        else:
            flat.append(entry)
    return flat


def _micro_batch(action: Action) -> int:
    if action.micro_batch is None:
        raise ValueError(f"{action} has no micro-batch")
    return action.micro_batch


def _with_target(loss: Loss, target: Any, output: Any) -> Tensor:
    return loss(output, target)
