"""From the gradients of a window to one step that is applied, skipped or refused, the same on every
rank.

The order is fixed: reduce what is left, agree on non-finite values, measure one norm, clip, step,
move the loss scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroexp.comm import World
from zeroexp.errors import NonFiniteError
from zeroexp.precision import LossScale, Policy
from zeroexp.zero.agreement import Agreement, agree, first_nonfinite, over_the_pipe
from zeroexp.zero.delayed import DelayedSteps
from zeroexp.zero.early import EarlyStep
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.residency import Residency
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.stepper import Stepper
from zeroexp.zero.ties import Ties
from zeroexp.zero.window import Window

_LOG = logging.getLogger("zeroexp")


class Boundary:
    """The boundary of one engine. ``clip`` is the L2 norm to which :meth:`step` clips, if any;
    ``early`` what makes a part of the step in backward, if anything does; ``delayed``
    what steps in the place of steppers; ``ties`` the weights shared with other stages, if any."""

    def __init__(
        self,
        model: ShardedModel,
        residency: Residency,
        reducer: Reducer,
        window: Window,
        scale: LossScale,
        policy: Policy,
        steppers: Sequence[Stepper],
        *,
        clip: float | None,
        early: EarlyStep | None,
        delayed: DelayedSteps,
        ties: Ties | None = None,
    ) -> None:
        self._model = model
        self._residency = residency
        self._reducer = reducer
        self._window = window
        self._scale = scale
        self._policy = policy
        self._steppers = steppers
        self._clip = clip
        self._early = early
        self._delayed = delayed
        self._ties = ties
        self._agreements: dict[int, Agreement] = {}
        self._factors: dict[int, float] = {}
        self._summed: set[int] = set()
        self.grad_norm: float | None = None
        """Global L2 norm of the last gradients, unscaled, before clipping."""
        self.grad_norm_clipped: float | None = None
        """The same after clipping."""
        self.steps = 0
        """Boundaries passed, skipped ones included."""
        self.skipped = 0
        """Boundaries at which no step was applied because a gradient was not finite."""

    @property
    def _world(self) -> World:
        return self._model.around.world

    # -- agreement ---------------------------------------------------------------------------------

    def finish(self, stepper: Stepper) -> Agreement:
        """Reduce what is left, agree with the other ranks, measure the norm. Idempotent until
        gradients are added, stepped or dropped."""
        key = id(stepper)
        if key in self._agreements:
            return self._agreements[key]
        if self._window.unreduced:
            self._reducer.flush([u for u in self._reducer.units if u.trains])
            self._window.unreduced = False
        agreement = self._agree(stepper)
        if agreement.late:  # gradients that arrived after their unit had been reduced, on some rank
            if self._early is not None:
                self._early.refuse_late([self._reducer.units[i] for i in agreement.late])
            self._reducer.flush([self._reducer.units[i] for i in agreement.late])
            agreement = self._agree(stepper)
        if key not in self._summed and self._sum_copies(stepper, agreement):
            self._summed.add(key)
            agreement = self._agree(stepper)
        agreement = over_the_pipe(self._world, agreement)
        self._agreements[key] = agreement
        self.grad_norm = self.grad_norm_clipped = self._norm_of([stepper])
        return agreement

    def _sum_copies(self, stepper: Stepper, agreement: Agreement) -> bool:
        """Sum the gradients of replicas, and those of tied weights; whether there are any."""
        replicas = [s for s in stepper.segments if s.sharing.replicas.size > 1]
        for segment in replicas:
            with segment.grads.at_hand(edits=True) as owned:
                here = owned.to(self._model.around.device)  # itself, unless it is off the device
                segment.sharing.replicas.all_reduce(
                    here, tag=segment.tag, what="all-reduce over the replicas"
                ).wait()
                owned.copy_(here)
        if self._ties is None:
            return bool(replicas)
        touched = [any(slots) for slots in agreement.touched]
        return self._ties.sum_gradients(stepper.segments, touched) or bool(replicas)

    def _agree(self, stepper: Stepper) -> Agreement:
        orders = [*self._residency.orders.values(), self._reducer.order]
        agreement = agree(
            self._world,
            self._reducer.units,
            stepper.segments,
            digest=sum(order.digest() for order in orders),
            loss_finite=self._window.loss_finite,
        )
        if agreement.same_order:
            for order in orders:
                order.adopt()
        return agreement

    def _norm_of(self, steppers: Sequence[Stepper]) -> float:
        total = sum(self._agreements[id(s)].sum_squares for s in steppers)
        return math.sqrt(total) / self._window.loss_scale if math.isfinite(total) else math.nan

    # -- clipping ----------------------------------------------------------------------------------

    def clip_norm(self, max_norm: float, steppers: Sequence[Stepper]) -> float:
        """Scale the gradients down to a global L2 norm of ``max_norm``; returns the norm before
        (torch's ``clip_grad_norm_``, with its 1e-6)."""
        self._not_after_early("clipping by norm comes")
        for stepper in steppers:
            self.finish(stepper)
        norm = self._norm_of(steppers)
        self.grad_norm = self.grad_norm_clipped = norm
        if math.isfinite(norm):
            coefficient = _coefficient(max_norm, norm)
            self.grad_norm_clipped = norm * coefficient
            for stepper in steppers:
                self._factors[id(stepper)] = self._factors.get(id(stepper), 1.0) * coefficient
        return norm

    def clip_value(self, limit: float, steppers: Sequence[Stepper]) -> None:
        """Clamp every element of the unscaled gradients to ``[-limit, limit]``."""
        self._not_after_early("clipping by value comes")
        for stepper in steppers:
            if not self.finish(stepper).finite:
                continue
            bound = limit * self._window.loss_scale
            for segment in stepper.segments:
                if segment.grads.has_owned:
                    with segment.grads.at_hand(edits=True) as owned:
                        owned.clamp_(-bound, bound)
            del self._agreements[id(stepper)]
            before = self.grad_norm
            self.finish(stepper)
            self.grad_norm = before

    def _not_after_early(self, what: str) -> None:
        if self._early is not None:
            self._early.refuse(what)

    # -- step --------------------------------------------------------------------------------------

    def step(self, steppers: Sequence[Stepper]) -> bool:
        """Apply the gradients; True if they were applied. Raises :class:`NonFiniteError`."""
        agreements = [self.finish(s) for s in steppers]
        finite = all(a.finite for a in agreements)
        self.steps += 1
        self._window.restart()
        if not finite and self._policy.nonfinite != "apply":
            self._refuse(steppers, agreements)
            return False
        if finite:
            norm = self._norm_of(steppers)
            if self._clip:
                for one in steppers:
                    self._factors.setdefault(id(one), _coefficient(self._clip, norm))
            factor = self._factors.get(id(steppers[0]), 1.0) if steppers else 1.0
            self.grad_norm, self.grad_norm_clipped = norm, norm * factor
        for stepper, agreement in zip(steppers, agreements, strict=True):
            touched = dict(zip((s.tag for s in stepper.segments), agreement.touched, strict=True))
            factor = self._factors.get(id(stepper), 1.0)
            if self._early is not None:
                self._early.land()
            steps = self._delayed.of(stepper) or stepper
            steps.step(touched, factor / self._window.loss_scale)
        if self._early is not None:
            self._early.end()
        self._residency.release_all()
        self.forget(steppers)
        self._scale.update(overflow=False)
        return True

    def _refuse(self, steppers: Sequence[Stepper], agreements: Sequence[Agreement]) -> None:
        """A gradient is not finite: skip or stop, on every rank alike."""
        stop = self._policy.nonfinite == "stop"
        torn = self._early is not None and self._early.begun
        if self._early is not None:
            self._early.end()
        if not stop:
            self._delayed.publish()  # only this step is skipped, not the one before
        name, owner = "", -1
        if stop or self._scale.at_floor:
            segments = [s for stepper in steppers for s in stepper.segments]
            name, owner = first_nonfinite(self._model, segments)
        self._residency.release_all()
        self.forget(steppers)
        if stop:
            bad = sorted({r for a in agreements for r in a.bad_loss_ranks})
            raise NonFiniteError(self._reason(name, owner, bad) + (_TORN if torn else ""))
        before = self._scale.value
        self._scale.update(overflow=True, culprit=name)
        self.skipped += 1
        if self._world.rank == 0:
            change = (
                f"loss scale {before:g} -> {self._scale.value:g}"
                if self._scale.dynamic
                else "not finite"
            )
            _LOG.warning("step %d skipped: gradients overflow, %s", self.steps, change)

    def _reason(self, name: str, owner: int, bad: Sequence[int]) -> str:
        where = "rank " + ", ".join(map(str, bad))
        if owner < 0:
            return (
                f"step {self.steps}: the loss is not finite on {where}, although all gradients "
                "are. Look for a constant in it that is infinite or not a number (a mask, a log "
                "of zero, a division by zero); precision.nonfinite=skip skips such steps."
            )
        loss = f"; the loss was not finite on {where}" if bad else ""
        outside = (
            " A loss that reads parameters outside of forward() (a penalty on weights) must be "
            "computed inside engine.scope() at this ZeRO stage."
            if self._residency.gathers
            else ""
        )
        return (
            f"step {self.steps}: the gradient of {name} is not finite (found by rank {owner}, "
            f"which owns that part){loss}. Set precision.nonfinite=skip to skip such steps; look "
            "for a division by zero, a log of zero, or a learning rate that is too high." + outside
        )

    # -- gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def reopen(self) -> None:
        """More gradients will be added to those that were agreed upon: clipping decided so far is
        applied to them now, and of what replicas or tied copies have summed one keeps the sum."""
        if self._early is not None:
            self._early.begin()
        for stepper in self._steppers:
            clipped, summed = self._factors.pop(id(stepper), 1.0), id(stepper) in self._summed
            for segment in stepper.segments:
                other_keeps = segment.sharing.replicas.index or not segment.counted
                factor = 0.0 if summed and other_keeps else clipped
                if factor != 1.0 and segment.grads.has_owned:
                    with segment.grads.at_hand(edits=True) as owned:
                        owned.mul_(factor) if factor else owned.zero_()
        self._agreements.clear()
        self._summed.clear()

    def give_up_begun(self) -> None:
        """A checkpoint replaces everything: what was begun of a step (and torn by an exception,
        maybe) is no part of it."""
        if self._early is None or not self._early.begun:
            return
        self._early.end()
        if self._reducer.interrupted:
            self._reducer.abandon()
        self.forget(self._steppers)
        self._window.restart()
        _LOG.warning("a checkpoint is loaded over a step that had begun in backward: dropped")

    def forget(self, steppers: Sequence[Stepper]) -> None:
        """Drop the accumulated gradients of ``steppers``."""
        self._not_after_early("gradients were dropped")
        mine = {s.tag for stepper in steppers for s in stepper.segments}
        for unit in self._reducer.units:
            unit.clear_gradients(mine)
        for stepper in steppers:
            self._agreements.pop(id(stepper), None)
            self._factors.pop(id(stepper), None)
            self._summed.discard(id(stepper))
        left = any(any(s.grads.touched) for s in self._model.trainable_segments)
        self._window.forget(gradients_left=left)

    def full_grad(self, segment: SegmentState, slot: int, stepper: Stepper) -> Tensor | None:
        """The whole reduced gradient of the parameter in ``slot`` of ``segment``, in fp32, unscaled
        and clipped; ``None`` if no rank has one (collective)."""
        self._not_after_early("a gradient was asked for")
        agreement = self.finish(stepper)
        if not agreement.touched[stepper.segments.index(segment)][slot]:
            return None
        with segment.grads.at_hand() as owned:
            mine = owned.to(self._model.around.device, copy=True)
            out = torch.empty(segment.spec.size, dtype=mine.dtype, device=mine.device)
            segment.sharing.gather.all_gather(
                out, mine, tag=segment.tag, what="all-gather of a gradient"
            ).wait()
        at = segment.spec.slots[slot]
        grad = out[at.offset : at.stop].view(at.spec.shape).float()
        return grad * (self._factors.get(id(stepper), 1.0) / self._window.loss_scale)


_TORN = (
    " Units that were finite had been stepped in backward already (offload.step_in_backward), so "
    "the weights are between two steps: load a checkpoint to go on."
)


def _coefficient(max_norm: float, norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))
