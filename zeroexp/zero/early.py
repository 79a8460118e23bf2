"""Steps a unit inside the backward in which its gradients become complete, beside the rest of it.

Only where nothing must be known of all gradients first. What is stepped is then released, and
nobody may use it before the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from zeroexp.comm import World
from zeroexp.config import Config, waits_for
from zeroexp.errors import ModelError, OptimizerError
from zeroexp.placement import Tier
from zeroexp.precision import Policy
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.stepper import Stepper
from zeroexp.zero.surroundings import Surroundings
from zeroexp.zero.unit import Life, UnitState
from zeroexp.zero.window import Window

_BESIDE = 2
"""Segments whose gradients may wait for the thread that steps; more would fill the memory."""

OFF = "Set offload.step_in_backward=false."


@dataclass
class _Job:
    segment: SegmentState
    future: Future[None]


class EarlyStep:
    """The part of ``stepper``'s step that is made in backward. ``following`` gives the unit whose
    gradients will probably be complete after those of a unit."""

    def __init__(
        self,
        stepper: Stepper,
        window: Window,
        world: World,
        policy: Policy,
        following: Callable[[UnitState], UnitState | None],
    ) -> None:
        self._stepper = stepper
        self._following = following
        self._window = window
        self._world = world
        self._applies_all = policy.nonfinite == "apply"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeroexp-step")
        self._jobs: list[_Job] = []
        self._foreseen: Future[None] | None = None
        self._units: list[UnitState] = []
        self._active = False

    @property
    def begun(self) -> bool:
        """Whether parts of the step are made, and it must be brought to an end."""
        return bool(self._units)

    def refuse(self, what: str) -> None:
        """Raise :class:`ModelError` if ``what`` comes between a backward and its step, when a part
        of the step is made already."""
        if self._units:
            raise ModelError(
                f"{what} between backward and step, but unit {self._units[0].label} was stepped in "
                f"backward as soon as its gradients were complete. {OFF} To go on here, load a "
                "checkpoint."
            )

    def refuse_late(self, units: Sequence[UnitState]) -> None:
        """Raise :class:`ModelError`, on every rank alike, if some rank may have stepped ``units``,
        for which another one has more gradients."""
        if self._active:
            raise ModelError(
                f"unit {units[0].label} got gradients after its gradients had been reduced, on "
                f"some rank, and may have been stepped by then. {OFF}"
            )

    def begin(self) -> None:
        """A backward begins."""
        self.refuse("another backward came")
        self._active = self._window.complete

    def reduced(self, unit: UnitState) -> None:
        """The gradients of ``unit`` are with their owners: step it, if it is done with."""
        if not (self._active and self._ready(unit)):
            return
        self._units.append(unit)
        unit.stepped = True
        for segment in unit.trainable_segments:
            # Peers may still be fetching the shard that is about to change.
            segment.sharing.gather.settle(segment.tag)
            while len(self._jobs) >= _BESIDE:
                self._end_first()
            job = self._stepper.step_ahead(segment, segment.mirror.begin())
            self._jobs.append(_Job(segment, self._thread.submit(job)))
        following = self._following(unit)
        if following is not None:
            foresee = self._stepper.foresee(following.trainable_segments)
            self._foreseen = self._thread.submit(foresee)

    def _ready(self, unit: UnitState) -> bool:
        segments = unit.trainable_segments
        in_use = unit.pins or unit.outstanding or unit.open or unit.life is not Life.SHARDED
        return (
            not (unit.collective and in_use)
            and all(s.mirror.may_be_ahead and all(s.grads.touched) for s in segments)
            and (self._applies_all or self._finite(segments))
        )

    def _finite(self, segments: list[SegmentState]) -> bool:
        return self._window.loss_finite and all(s.grads.finite for s in segments)

    def _end_first(self) -> None:
        job = self._jobs.pop(0)
        job.future.result()
        job.segment.mirror.end()
        job.segment.grads.discard()

    def wait(self) -> None:
        """Return when all that was begun is stepped."""
        while self._jobs:
            self._end_first()
        if self._foreseen is not None:  # the boundary reads from the same files
            self._foreseen.result()
            self._foreseen = None

    def land(self) -> None:
        """Backward is over on this rank: what was stepped shows."""
        self.wait()
        for unit in self._units:
            for segment in unit.trainable_segments:
                segment.mirror.land()

    def end(self) -> None:
        """The step is over, or given up: nothing of it goes into the next one."""
        self.wait()
        for unit in self._units:
            for segment in unit.trainable_segments:
                segment.mirror.land(keep=False)
        self._stepper.end_ahead()
        for unit in self._units:
            unit.stepped = False
        self._units = []
        self._active = False

    def close(self) -> None:
        """End the thread; what it does is not waited for."""
        self._thread.shutdown(wait=False)


def early_step(
    config: Config,
    steppers: Sequence[Stepper],
    window: Window,
    around: Surroundings,
    following: Callable[[UnitState], UnitState | None],
    *,
    reason: str | None,
) -> EarlyStep | None:
    """What steps in backward, where ``offload.step_in_backward`` wants it and nothing forbids it;
    ``reason``: what the caller knows that does. Raises :class:`OptimizerError` where it is asked
    for by name and cannot be."""
    asked = config.offload.step_in_backward
    if asked == "false" or not steppers:
        return None
    placement, key = around.placement, waits_for(config, clips=False)
    reasons = {
        "the optimizer state is on the device": placement.optim.tier is Tier.DEVICE,
        "every rank steps everything (stage 0)": not placement.optim.sharded,
        "there are several optimizers": len(steppers) > 1,
        "replicas must sum their gradients first": around.world.sharing().replicas.size > 1,
        f"{key} must know of all gradients first": key is not None,
        "the update is delayed": config.offload.delayed_update,
    }
    reason = reason or next((text for text, holds in reasons.items() if holds), None)
    if reason is None:
        return EarlyStep(steppers[0], window, around.world, around.policy, following)
    if asked == "true":
        raise OptimizerError(
            f"offload.step_in_backward=true is not possible here: {reason}. Use auto or false."
        )
    return None
