"""When a backward begins, ends or fails: the engine's own, a bare ``loss.backward()``, and
``autograd.grad``, which leaves no gradients and is no micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import Variable

from zeroexp.zero.reducer import Reducer
from zeroexp.zero.residency import Direction, Residency
from zeroexp.zero.unit import UnitState
from zeroexp.zero.window import Window


class Backward:
    """Brackets every walk of autograd through the model.

    ``begins`` is called before a micro-batch adds its gradients. ``ranks`` is the number of ranks
    over which gradients are averaged.
    """

    def __init__(
        self,
        residency: Residency,
        reducer: Reducer,
        window: Window,
        *,
        ranks: int,
        begins: Callable[[], None],
    ) -> None:
        self._residency = residency
        self._reducer = reducer
        self._window = window
        self._ranks = ranks
        self._begins = begins
        self._running = False
        self._bare = False

    @contextmanager
    def scope(self, last: bool | None, units: Sequence[UnitState] | None = None) -> Iterator[None]:
        """Around one call of autograd; what it leaves behind is reduced when it ends. ``units``:
        the only ones that it reaches, on every rank (None: it may reach all)."""
        self._begin(last, units)
        if self._residency.gathers and torch.is_grad_enabled():
            self._residency.begin_pass(Direction.BACKWARD)
            self._residency.need_root()
        try:
            yield
        except BaseException:
            self._running = False
            self._reducer.reducing = False
            self._residency.end_pass(failed=True)
            raise
        self._end()

    def walk_begins(self) -> None:
        """Autograd reached the model outside :meth:`scope`."""
        if not self._running:
            Variable._execution_engine.queue_callback(self._end_walk)

    def gradient_arrives(self) -> None:
        """The walk leaves gradients, so it is a backward."""
        if self._running:
            return
        self._begin(None)
        self._bare = True
        Variable._execution_engine.queue_callback(self._end_bare)

    def end_failed_walk(self) -> None:
        """Autograd calls nobody when it raises: what a bare backward left open ends here."""
        if self._bare:
            self._bare = self._running = False
            self._reducer.reducing = False
        if not self._running and self._residency.direction is Direction.BACKWARD:
            self._residency.end_pass(failed=True)

    def _begin(self, last: bool | None, units: Sequence[UnitState] | None = None) -> None:
        reduces = self._window.begin(last)
        self._running = True
        self._begins()
        self._reducer.begin(
            reduce=reduces,
            divisor=float(self._window.parts * self._ranks),
            divide_on_arrival=self._window.divides_on_arrival,
            units=units,
        )

    def _end(self) -> None:
        self._running = False
        if self._residency.direction is Direction.BACKWARD:
            self._residency.end_pass()
        self._reducer.end()
        self._residency.settle()

    def _end_walk(self) -> None:
        if not self._running and self._residency.direction is Direction.BACKWARD:
            self._residency.end_pass()
            self._residency.settle()

    def _end_bare(self) -> None:
        if self._running:
            self._bare = False
            self._end()
