"""Steps one boundary late, beside the forward and backward that follow (the delayed parameter
update of Ren et al., arXiv:2101.06840, section 5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from zeroexp.optim.history import Run
from zeroexp.placement import Tier
from zeroexp.zero.pieces import PieceStep
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.stepper import Stepper
from zeroexp.zero.surroundings import Surroundings


@dataclass
class _Work:
    """What is being stepped: copies, since gradients and values of the segment are in use."""

    segment: SegmentState
    runs: list[Run]
    gradient: Tensor
    values: Tensor


class DelayedStep:
    """Steps for ``stepper``: each boundary publishes what the one before has begun, and begins its
    own.

    Gradients are those of the weights before the last update: with weights ``w`` and their gradient
    ``g``, ``w[i+1] = step(w[i], g(w[i-1]))``. Hyperparameters are those of the boundary that begins
    a step.
    """

    def __init__(self, stepper: Stepper, around: Surroundings) -> None:
        self._stepper = stepper
        self._around = around
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeroexp-delayed")
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._pieces: PieceStep | None = None
        self._future: Future[None] | None = None
        self._work: list[_Work] = []

    def step(self, touched: Mapping[int, Sequence[bool]], scale: float) -> None:
        """Publish the last step, begin the next. Collective."""
        self.publish()
        stepper = self._stepper
        pieces = stepper.new_pieces(scale)
        for segment in stepper.prepare(touched):
            runs = stepper.present(segment, touched)
            gradient, values = self._copies_of(segment)
            with segment.grads.stepped() as arrived:
                gradient.copy_(arrived)
            pieces.announce(segment, runs)
            self._work.append(_Work(segment, runs, gradient, values))
        self._pieces = pieces
        self._future = self._thread.submit(_run, pieces, self._work)

    def wait(self) -> None:
        """Return when state and master copies hold the last step."""
        if self._future is not None:
            future, self._future = self._future, None
            future.result()
            assert self._pieces is not None
            self._pieces.finish()

    def publish(self) -> None:
        """Make the last step visible in the parameters. Collective."""
        self.wait()
        work, self._work = self._work, []
        self._around.world.settle()
        for each in work:
            segment = each.segment
            partly = sum(r.stop - r.start for r in each.runs) < segment.num_stepped
            with segment.mirror.updating(keeps=partly) as values:
                for run in each.runs:
                    values[run.start : run.stop].copy_(each.values[run.start : run.stop])
        self._stepper.publish([each.segment for each in work])

    @property
    def copies(self) -> list[Tensor]:
        """What it keeps of gradients and new values from one boundary to the next."""
        return [copy for pair in self._copies.values() for copy in pair]

    def close(self) -> None:
        """End the thread; what it does is not waited for."""
        self._thread.shutdown(wait=False)

    def _copies_of(self, segment: SegmentState) -> tuple[Tensor, Tensor]:
        found = self._copies.get(segment.tag)
        if found is None:
            gradient = segment.zeros(segment.num_stepped, segment.grads.dtype, Tier.CPU)
            values = segment.zeros(segment.num_stepped, segment.dtype, Tier.CPU)
            segment.hold_delayed(gradient.nbytes + values.nbytes)
            found = self._copies[segment.tag] = gradient, values
        return found


def _run(pieces: PieceStep, work: Sequence[_Work]) -> None:
    for each in work:
        pieces.step(each.segment, each.runs, each.gradient, each.values)


class DelayedSteps:
    """The delayed steps of one engine; none where ``steppers`` is empty."""

    def __init__(self, steppers: Sequence[Stepper], around: Surroundings) -> None:
        self._steps = {id(s): DelayedStep(s, around) for s in steppers}

    def of(self, stepper: Stepper) -> DelayedStep | None:
        """What steps in place of ``stepper``."""
        return self._steps.get(id(stepper))

    def publish(self) -> None:
        """Make all steps visible, before anything else changes values. Collective."""
        for step in self._steps.values():
            step.publish()

    def wait(self) -> None:
        """Let all steps end: what is saved has them."""
        for step in self._steps.values():
            step.wait()

    @property
    def copies(self) -> list[Tensor]:
        """See :attr:`DelayedStep.copies`."""
        return [copy for step in self._steps.values() for copy in step.copies]

    def close(self) -> None:
        """End their threads; what they do is not waited for."""
        for step in self._steps.values():
            step.close()
