"""The engine as owner of a pipeline's stages: what the executor's calls mean for its units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from zeroexp.pipeline.action import Kind
from zeroexp.pipeline.runtime.stage import Stage
from zeroexp.zero.marked import MarkedResidency
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.unit import UnitState

Scope = Callable[..., AbstractContextManager[Any]]


class StageOwner:
    """See :class:`zeroexp.pipeline.runtime.owner.Owner`. ``forward_scope()`` and
    ``backward_scope(last=, units=)`` are the engine's."""

    def __init__(
        self,
        model: ShardedModel,
        residency: MarkedResidency,
        stages: Sequence[Stage],
        forward_scope: Scope,
        backward_scope: Scope,
    ) -> None:
        self._residency = residency
        self._forward_scope, self._backward_scope = forward_scope, backward_scope
        self._units = {stage.index: _units_of(model, stage) for stage in stages}
        self._marked: list[int] = []
        self.ends_window = True
        """Whether a step follows the run that goes on."""

    def unshard(self, stage: int) -> None:
        self._marked.append(stage)
        self._residency.unshard(self._units[stage])

    def reshard(self, stage: int) -> None:
        self._marked.remove(stage)
        self._residency.reshard(self._units[stage])

    def reduce_grads(self, stage: int) -> None:
        """Nothing: the last backward of a stage reduces as its gradients arrive."""

    def forward(self, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        return self._forward_scope()

    def backward(
        self, stage: int, micro_batch: int, kind: Kind, last: bool
    ) -> AbstractContextManager[Any]:
        if kind is Kind.BACKWARD_INPUT:
            return nullcontext()
        units = self._units[stage]
        if kind is Kind.BACKWARD_WEIGHT:  # it begins anywhere inside units, past their outputs
            for unit in units:
                self._residency.need(unit)
        return self._backward_scope(last=last and self.ends_window, units=units)

    def failed(self) -> None:
        """Nothing yet: a peer may be gone, and the first error must not wait for it."""

    def tidy(self) -> None:
        """After a run that failed: nothing is marked any more."""
        for stage in list(self._marked):
            self.reshard(stage)

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """Every stage of this rank is whole inside, for a run without marks."""
        if not self._residency.gathers:
            yield
            return
        for stage in self._units:
            self.unshard(stage)
        yield  # after an exception the ranks no longer agree: tidy() ends what is open
        for stage in self._units:
            self.reshard(stage)


def _units_of(model: ShardedModel, stage: Stage) -> list[UnitState]:
    """The units that a stage uses, in the model's order (two stages may share some)."""
    own = {id(p) for p in stage.module.parameters()}
    return [u for u in model.units if any(id(p) in own for s in u.segments for p in s.params)]
