"""One step of an optimizer in pieces: parts of its tensors at a time, each with the state of that
part, on any thread, without touching the user's object until the step is over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zeroexp.optim.face import State


def plain_step(optimizer: Optimizer) -> Callable[[Any], Any]:
    """Its ``step`` as a function, without torch's wrapper that calls the hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def bare_twin(optimizer: Optimizer, **attributes: Any) -> Any:
    """Another object of its class with its attributes, but for those given; without its hooks, and
    without the methods that an engine or a scheduler put on the instance."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {
        **optimizer.__dict__,
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
        **attributes,
    }
    for name in ("step", "zero_grad"):
        twin.__dict__.pop(name, None)
    return twin


class Twin:
    """``optimizer`` as it is now, for one step.

    Every piece begins with the hyperparameters and attributes that the optimizer has when the twin
    is made, so that an optimizer that counts its steps in them counts one; :meth:`finish` gives the
    optimizer what the first piece made of them. Hooks of its ``step`` are called once, in the
    thread that makes the twin and the one that finishes it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._template = bare_twin(optimizer)
        self._groups = [_copied(group) for group in optimizer.param_groups]
        self._groups_after: dict[int, dict[str, Any]] = {}
        self._attributes_after: dict[str, Any] | None = None
        self._step = plain_step(optimizer)
        self._call_hooks("pre")

    def changed(self) -> bool:
        """Whether the user has changed a hyperparameter since the twin was made."""
        now = [_copied(group) for group in self._optimizer.param_groups]
        return not all(_equal(a, b) for a, b in zip(now, self._groups, strict=True))

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[Sequence[Tensor]],
        state: State,
        *,
        attributes: dict[str, Any],
    ) -> None:
        """Step the tensors of each parameter group, which carry their gradients; ``attributes`` are
        set on the optimizer for this piece."""
        chosen = [i for i, tensors in enumerate(groups) if tensors]
        parts = [{**_copied(self._groups[i]), "params": list(groups[i])} for i in chosen]
        piece = bare_twin(self._template, state=state, param_groups=parts, **attributes)
        self._step(piece)
        for i, group in zip(chosen, piece.param_groups, strict=True):
            self._groups_after.setdefault(i, {k: v for k, v in group.items() if k != "params"})
        if self._attributes_after is None:
            self._attributes_after = {
                name: value
                for name, value in piece.__dict__.items()
                if name not in attributes
                and name not in _ITS_OWN
                and value is not self._template.__dict__.get(name)
            }

    def finish(self) -> None:
        """The step is over."""
        for i, values in self._groups_after.items():
            before = self._groups[i]
            self._optimizer.param_groups[i].update(
                {k: v for k, v in values.items() if not _same(v, before.get(k))}
            )
        self._optimizer.__dict__.update(self._attributes_after or {})
        self._call_hooks("post")
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as Face.step

    def _call_hooks(self, when: str) -> None:
        everywhere = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks")
        own = getattr(self._optimizer, f"_optimizer_step_{when}_hooks", {})
        for hook in [*everywhere.values(), *own.values()]:
            hook(self._optimizer, (), {})


_ITS_OWN = frozenset(
    {"state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
