"""Runs a rank's list: every action, transfer and mark of a schedule, in the list's order.

Transfers never hold the rank where the list names them: a send copies and goes, a receive is opened
there (or earlier) and waited for where its value is used. A rank whose action fails tells the ranks
that wait for it, takes what is still on its way to it, and meets the others at the run's end, so
that every rank raises the first error and nobody hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from zeroexp.errors import CollectiveTimeout, ModelError
from zeroexp.pipeline.action import RECEIVES, SENDS, Action, Exchange, Kind
from zeroexp.pipeline.runtime.agreement import agree
from zeroexp.pipeline.runtime.channel import Channel
from zeroexp.pipeline.runtime.failure import Note, failure_of, first_of
from zeroexp.pipeline.runtime.forwards import forward_lists
from zeroexp.pipeline.runtime.lane import Inbox, Outbox, PeerFailed, Way
from zeroexp.pipeline.runtime.message import Message, describe
from zeroexp.pipeline.runtime.owner import Nobody, Owner
from zeroexp.pipeline.runtime.run import Result, Run
from zeroexp.pipeline.runtime.stage import Stage
from zeroexp.pipeline.schedule import Schedule

Loss = Callable[[Any, Any], Tensor]
"""A micro-batch's mean loss from the last stage's output and its target."""


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
        self.owner: Owner = owner or Nobody()
        self._last = schedule.num_stages - 1
        self._interrupted = False
        """Whether a run did not come to its end, where the ranks meet."""
        self.schedule = agree(schedule, channel, self._check)
        self._outboxes: dict[tuple[Way, int], Outbox] = {}
        self._inboxes: dict[tuple[Way, int], Inbox] = {}
        self._open_lanes()
        self._do: dict[Kind, Callable[[Run, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: partial(self._send, Way.ACTIVATION),
            Kind.SEND_GRADIENT: partial(self._send, Way.GRADIENT),
            Kind.RECV_ACTIVATION: partial(self._recv, Way.ACTIVATION),
            Kind.RECV_GRADIENT: partial(self._recv, Way.GRADIENT),
            Kind.UNSHARD: lambda run, action: self.owner.unshard(action.stage),
            Kind.RESHARD: lambda run, action: self.owner.reshard(action.stage),
            Kind.REDUCE_GRADS: lambda run, action: self.owner.reduce_grads(action.stage),
        }
        self._plan = _flat(self.schedule.lists[self.rank])

    # -- construction ------------------------------------------------------------------------------

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
        run = self._new_run(inputs, targets, weights, training=True)
        run.last_backward = self._last_backwards()
        for stage in self.stages.values():
            stage.forget()

        def prepare() -> None:
            run.check()
            run.seed(scale, divisor)

        return self._carry_out(run, self._plan, prepare)

    def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        micro_batches: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> Result:
        """Forward only, of any number of micro-batches (default: the schedule's).

        With ``targets`` the loss is known on every rank; without, the last stage's rank has the
        outputs.
        """
        run = self._new_run(inputs, targets, weights, training=False, count=micro_batches)
        actions = forward_lists(self.schedule.rank_of, run.count)[self.rank]
        return self._carry_out(run, actions, run.check)

    def interrupt(self) -> None:
        """Not every rank that takes part knows that a run has failed: there is no other."""
        self._interrupted = True

    def refuse_if_interrupted(self) -> None:
        """Raises :class:`ModelError` where ranks of an earlier run may still wait for this one."""
        if self._interrupted:
            raise ModelError(
                "an earlier run of this pipeline was interrupted: what its ranks sent each other "
                "is still on its way. Build a new engine, and load a checkpoint"
            )

    def _new_run(
        self,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        weights: Sequence[float] | None,
        *,
        training: bool,
        count: int | None = None,
    ) -> Run:
        count = self.schedule.micro_batches if count is None else count
        first, last = 0 in self.stages, self._last in self.stages
        return Run(count, first, last, inputs, targets, weights, training)

    def _carry_out(
        self, run: Run, actions: Sequence[Action], prepare: Callable[[], None]
    ) -> Result:
        self.refuse_if_interrupted()
        self._interrupted = True
        owed = Counter((action.kind, action.stage) for action in actions if action.is_transfer)
        for (way, boundary), outbox in self._outboxes.items():
            kind = Kind.SEND_ACTIVATION if way is Way.ACTIVATION else Kind.SEND_GRADIENT
            outbox.owed = owed[kind, boundary + (way is Way.GRADIENT)]
        for (way, boundary), inbox in self._inboxes.items():
            kind = Kind.RECV_ACTIVATION if way is Way.ACTIVATION else Kind.RECV_GRADIENT
            inbox.begin(owed[kind, boundary + (way is Way.ACTIVATION)])
        failure: Note | None = None
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
            failure = failure_of(error, action, self.channel.rank)
        notes: Sequence[Note | None] | None = None
        met = True
        try:
            if failure is not None:
                self._give_up(actions)
            for outbox in self._outboxes.values():
                outbox.flush()
            row = run.row(failed=failure is not None)
            rows = self.channel.exchange(row, "end of the pipeline's run")
            if rows[:, 0].any():
                notes = self.channel.exchange_notes(failure, "errors of the pipeline's run")
        except CollectiveTimeout:
            if cause is None or not failure:
                raise
            notes = [failure]  # nobody to agree with, but this rank has an error of its own
            met = False
        self._interrupted = not met
        if notes is not None:
            first = first_of(notes)
            raise first from cause if first.rank == self.channel.rank else None
        return run.result(rows)

    def _give_up(self, actions: Sequence[Action]) -> None:
        """Tell who waits for this rank, and take what others still send it, in the list's order: in
        another one, a sender could wait for a message to be taken that comes later here."""
        for outbox in self._outboxes.values():
            outbox.fail()
        for stage in self.stages.values():
            stage.forget()
        self.owner.failed()
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

    def _last_backwards(self) -> dict[int, Action]:
        """For each stage the action that adds its last gradients."""
        return {
            action.stage: action
            for action in self._plan
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        }

    # -- actions -----------------------------------------------------------------------------------

    def _forward(self, run: Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        given = (
            run.inputs[m]
            if s == 0 and run.inputs is not None
            else self._arrived(run, Way.ACTIVATION, s - 1, m)
        )
        if s == self._last:
            self._last_forward(run, given, m)
            return
        with self.owner.forward(s, m):
            if run.training:
                result = cast(Message, self.stages[s].forward(m, given))
            else:
                result = describe(self.stages[s].evaluate(given, None)[0])
        self._hand_on(run, Way.ACTIVATION, s, m, result)

    def _last_forward(self, run: Run, given: Any, m: int) -> None:
        loss_of = None
        if self._loss is not None and run.targets is not None:
            loss_of = partial(_with_target, self._loss, run.targets[m])
        stage = self.stages[self._last]
        with self.owner.forward(self._last, m):
            if run.training:
                run.losses[m] = cast(Tensor, stage.forward(m, given, loss_of))
                return
            output, value = stage.evaluate(given, loss_of)
        if value is None:
            run.outputs[m] = output
        else:
            run.losses[m] = value

    def _backward(self, run: Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        grads = self._output_grads(run, s, m)
        with self.owner.backward(s, m, action.kind, run.last_backward[s] == action):
            back = self.stages[s].backward(m, grads)
        self._hand_back(run, s, m, back)

    def _backward_input(self, run: Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        grads = self._output_grads(run, s, m)
        with self.owner.backward(s, m, action.kind, False):
            back = self.stages[s].backward_input(m, grads)
        self._hand_back(run, s, m, back)

    def _backward_weight(self, run: Run, action: Action) -> None:
        s, m = action.stage, _micro_batch(action)
        with self.owner.backward(s, m, action.kind, run.last_backward[s] == action):
            self.stages[s].backward_weight(m)

    def _output_grads(self, run: Run, s: int, m: int) -> list[Tensor | None]:
        if s < self._last:
            structure, tensors = self._arrived(run, Way.GRADIENT, s, m)
            return [tensors[at] if kind == "t" else None for kind, at in structure.shape[1]]
        loss = run.losses[m]
        return [torch.full_like(loss, run.seeds[m])]

    def _hand_back(self, run: Run, s: int, m: int, grads: list[Tensor | None]) -> None:
        if s:
            self._hand_on(run, Way.GRADIENT, s - 1, m, describe(grads))

    def _hand_on(self, run: Run, way: Way, boundary: int, m: int, message: Message) -> None:
        """Keep a result until the list sends it, or the rank's other stage uses it."""
        if way is Way.ACTIVATION and (way, boundary) not in self._outboxes:
            # The next stage may change its input in place, this stage's graph may have saved it.
            structure, tensors = message
            message = Message(structure, [tensor.detach().clone() for tensor in tensors])
        run.handed[way, boundary, m] = message

    def _arrived(self, run: Run, way: Way, boundary: int, m: int) -> Message:
        inbox = self._inboxes.get((way, boundary))
        if inbox is not None:
            return inbox.take(m)
        message: Message = run.handed.pop((way, boundary, m))
        return message

    def _send(self, way: Way, run: Run, action: Action) -> None:
        m = _micro_batch(action)
        boundary = min(action.stage, action.peer_stage)
        structure, tensors = run.handed.pop((way, boundary, m))
        self._outboxes[way, boundary].send(structure, tensors, self._what(action))

    def _recv(self, way: Way, run: Run, action: Action) -> None:
        boundary = min(action.stage, action.peer_stage)
        self._inboxes[way, boundary].expect(_micro_batch(action), self._what(action))

    def _what(self, action: Action) -> str:
        return f"pipeline {action} on rank {self.channel.rank}"


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
