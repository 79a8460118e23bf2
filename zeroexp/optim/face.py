"""The user's own optimizer object, stepped over flat shards.

Between steps ``optimizer.param_groups`` hold the module's own parameters, so schedulers,
``toggle_optimizer`` and user code see what they expect. For the duration of a step they hold flat
shards, and ``optimizer.state`` the state of those: there are no hyperparameters to mirror and no
second optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.errors import OptimizerError

State = MutableMapping[Tensor, dict[str, Any]]
"""Optimizer state by the tensor that is stepped."""


class Collect(Protocol):
    """Makes whole what an engine holds for an optimizer, in torch's format (collective)."""

    def __call__(self, *, everywhere: bool) -> Mapping[str, Any]:
        """On every rank, or on rank 0 alone; empty elsewhere."""


class Face:
    """Binds one optimizer to an engine.

    ``on_step`` and ``on_zero_grad`` replace the optimizer's own methods, so that user code which
    calls them directly reaches the engine. Its ``state_dict`` is refused: it would be empty.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        on_step: Callable[[], Any],
        on_zero_grad: Callable[[], None],
    ) -> None:
        if state_left_behind(optimizer):
            _unbind(optimizer)
        self.optimizer = optimizer
        self.state: State = defaultdict(dict)
        self._step = optimizer.step  # bound; a scheduler may have wrapped it already

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = closure() if closure is not None else None
            on_step()
            return loss

        def zero_grad(set_to_none: bool = True) -> None:
            on_zero_grad()

        # torch's schedulers look for this mark to tell whether a step goes past them; ours reaches
        # the wrapped one.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

        def refuse(*_: Any, **__: Any) -> Any:
            raise OptimizerError(
                "this optimizer's own state_dict() and load_state_dict() know nothing of its "
                "state, which lies sharded in a zeroexp engine. Call "
                "engine.optimizer_state_dict(optimizer) and "
                "engine.load_optimizer_state_dict(optimizer, state) on every rank."
            )

        optimizer.state_dict = refuse  # type: ignore[method-assign]
        optimizer.load_state_dict = refuse  # type: ignore[method-assign]

    def step(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Step the tensors of ``groups`` (one list per parameter group), which carry their
        gradients."""
        optimizer = self.optimizer
        own_groups, own_state = optimizer.param_groups, optimizer.state
        own_params = [group["params"] for group in own_groups]
        try:
            for group, tensors in zip(own_groups, groups, strict=True):
                group["params"] = list(tensors)
            optimizer.param_groups = [g for g in own_groups if g["params"]]
            optimizer.state = self.state  # type: ignore[assignment]
            if optimizer.param_groups:
                self._step()
        finally:
            for group, params in zip(own_groups, own_params, strict=True):
                group["params"] = params
            optimizer.param_groups, optimizer.state = own_groups, own_state
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look at

    def retire(self, collect: Collect) -> None:
        """The engine ends. Its state stays where it is until the optimizer is used again, which
        then goes on as if there had been no engine; nothing becomes whole that is not used."""
        optimizer = self.optimizer

        def restore() -> None:
            _unbind(optimizer)
            optimizer.load_state_dict(dict(collect(everywhere=True)))

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            restore()
            return optimizer.step(closure) if closure is not None else optimizer.step()

        def state_dict() -> Any:
            restore()
            return optimizer.state_dict()

        def load_state_dict(state: Any) -> None:
            _unbind(optimizer)
            optimizer.load_state_dict(state)

        _unbind(optimizer)
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        step._state_left_behind = collect  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.state_dict = state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def state_left_behind(optimizer: Optimizer) -> Collect | None:
    """How to collect the state that a closed engine holds for ``optimizer``, if one does."""
    found: Collect | None = getattr(optimizer.step, "_state_left_behind", None)
    return found


def _unbind(optimizer: Optimizer) -> None:
    """Give the optimizer its own methods back."""
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        with suppress(AttributeError):
            delattr(optimizer, name)
