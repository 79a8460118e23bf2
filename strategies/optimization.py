"""Backward, clipping and steps as Lightning asks for them, in the engine's terms."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zeroexp.errors import ModelError, OptimizerError, ZeroexpError

if TYPE_CHECKING:
    from zeroexp.engine import Engine
    from zeroexp.pipe_engine import PipeEngine


def unwrapped(optimizer: Any) -> Any:
    """The user's optimizer behind Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def refuse_closures(optimizers: Sequence[Any]) -> None:
    """Raise :class:`OptimizerError` where a step evaluates the loss several times."""
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__} evaluates the loss several times in one step, which a"
                " sharded step cannot do: use an optimizer that needs one gradient per step"
            )


class Optimization:
    """One engine, and what has to be remembered between Lightning's calls to it.

    ``engine`` is there between the strategy's ``setup`` and ``teardown``. ``left`` is the closed
    engine of the last fit: it still knows optimizer state, loss scale and counters, for a late
    save.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self.left: Engine | None = None
        self._groups: list[list[int]] = []
        self._blocked = 0
        self._clips = 0
        self._warned = False
        self._skipped: set[int] = set()
        self._pipe: PipeEngine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_pipe": None, "left": None}

    # ------------------------------------------------------------------ the engine
    @property
    def engine(self) -> Engine:
        """Raises :class:`ZeroexpError` outside a run."""
        if self._engine is None:
            raise ZeroexpError("there is no engine: it exists from setup to the end of a run")
        return self._engine

    @property
    def is_set_up(self) -> bool:
        return self._engine is not None

    def take(self, engine: Engine | None) -> None:
        """Work with ``engine`` from now on (``None``: with none)."""
        self._engine = engine
        self._groups = _sizes(engine)
        self._blocked = 0
        self._pipe = None
        self._skipped.clear()

    @property
    def groups_changed(self) -> bool:
        """Whether parameters were added to an optimizer since the engine was built."""
        return self._engine is not None and _sizes(self._engine) != self._groups

    # ------------------------------------------------------------------ backward
    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Backward passes inside are accumulating micro-batches: more will come before the step."""
        self._blocked += 1
        try:
            yield
        finally:
            self._blocked -= 1

    @property
    def step_follows(self) -> bool:
        """Whether a step follows the batch that runs now."""
        return self._blocked == 0

    def pipe_begins(self, engine: PipeEngine) -> None:
        """A pipeline runs forward and backward of a batch together, where Lightning expects the
        forward: the ``zero_grad`` and ``backward`` that it calls then have been done."""
        engine.zero_grad_comes_late = True
        self._pipe = engine

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """``loss.backward`` through the engine. Raises :class:`ModelError` for what it cannot
        do."""
        if gradient is not None:
            raise ModelError("backward(gradient=...) is not supported: return a scalar loss")
        if inputs is not None:
            raise ModelError(
                "backward(inputs=...) is not supported: set requires_grad (toggle_optimizer does)"
            )
        self.engine.backward(
            loss,
            last=self.step_follows,
            retain_graph=bool(retain_graph) or create_graph,
            create_graph=create_graph,
        )

    def run_backward(
        self, call: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Call ``call(loss, …)``, inside which ``loss.backward()`` is the engine's.

        That keeps a user's override of ``LightningModule.backward`` in force, and the loss scale
        and the reduction of gradients as well.
        """
        ran = []

        def backward(*a: Any, **k: Any) -> None:
            ran.append(True)
            del loss.backward  # the engine calls the tensor's own
            try:
                self.backward(loss, *a, **k)
            finally:
                loss.backward = backward  # type: ignore[method-assign]

        if self._pipe is not None:
            self._pipe.zero_grad_comes_late, self._pipe = False, None
            return
        loss.backward = backward  # type: ignore[method-assign]
        try:
            call(loss, *args, **kwargs)
        finally:
            del loss.backward
        if not ran:
            raise ModelError(
                "LightningModule.backward did not call backward() on the loss it was given; without"
                " that the gradients are neither scaled nor reduced"
            )

    # ------------------------------------------------------------------ boundary
    def finish(self, optimizer: Any) -> None:
        """Gradients complete on all ranks, unscaled; the norm is known from here on."""
        self.engine.finish_gradients(unwrapped(optimizer))

    def clip_norm(self, optimizer: Any, max_norm: float) -> float:
        """Clip by the global norm over all ranks; returns the norm before."""
        self._clips += 1
        return self.engine.clip_norm(max_norm, unwrapped(optimizer))

    def clip_value(self, optimizer: Any, value: float) -> None:
        self._clips += 1
        self.engine.clip_value(value, unwrapped(optimizer))

    @contextmanager
    def watch_clipping(self, overridden: bool) -> Iterator[None]:
        """Warn once when an overridden clipping hook leaves the engine's gradients alone."""
        before = self._clips
        yield
        if overridden and self._clips == before and not self._warned:
            self._warned = True
            warnings.warn(
                "configure_gradient_clipping did not call self.clip_gradients(...). Gradients live"
                " in the engine (p.grad is None), so torch.nn.utils.clip_grad_norm_ and"
                " clip_grad_value_ have no effect here.",
                stacklevel=2,
            )

    def step(self, optimizer: Any, **kwargs: Any) -> bool:
        """The engine's step; false where it was skipped because a gradient is not finite."""
        if kwargs:
            names = ", ".join(kwargs)
            raise OptimizerError(f"optimizer.step() takes no {names} with ZeroStrategy")
        optimizer = unwrapped(optimizer)
        applied = self.engine.step(optimizer)
        if applied:
            self._skipped.discard(id(optimizer))
        else:
            self._skipped.add(id(optimizer))
        return applied

    def step_applied(self, optimizer: Any) -> bool:
        """Whether the last step of ``optimizer`` was applied (true before the first)."""
        return id(unwrapped(optimizer)) not in self._skipped

    # ------------------------------------------------------------------ counters
    def engine_of(self, optimizer: Any) -> Engine | None:
        """The engine that steps ``optimizer``, or did in the last fit."""
        for engine in (self._engine, self.left):
            if engine is not None and any(known is optimizer for known in engine.optimizers):
                return engine
        return None

    def scalar_state(self) -> dict[str, Any]:
        """Loss scale and counters as plain numbers; empty where there was no training."""
        for engine in (self._engine, self.left):
            if engine is not None and engine.optimizers:
                return engine.scalar_state()
        return {}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        self.engine.load_scalar_state(state)


def _sizes(engine: Engine | None) -> list[list[int]]:
    """Number of parameters in each group of each optimizer."""
    optimizers = engine.optimizers if engine is not None else []
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


class ZeroGrad:
    """``zero_grad`` of an optimizer's wrapper: the optimizer's own, which the engine has bound to
    itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)
