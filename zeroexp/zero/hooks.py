"""Where the runtime meets the user's module: hooks on modules, on their inputs and outputs, and on
gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroexp.zero.access import ModuleHook
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.residency import Direction, Residency
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.unit import Flow, UnitState


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _raised(output: Any) -> bool:
    """Whether a forward hook with ``always_call`` runs because the forward raised."""
    return output is None and sys.exc_info()[0] is not None


class Edge:
    """What happens when the gradient of one activation is ready: first the unit that consumed it is
    retired, then the unit that produced it is gathered, so that the two are not whole together."""

    _ATTRIBUTE = "_zeroexp_edge"

    def __init__(self) -> None:
        self.retire: list[Callable[[Any], None]] = []
        self.gather: list[Callable[[Any], None]] = []

    @classmethod
    def of(cls, tensor: Tensor) -> Edge:
        """The edge of ``tensor``, made at the first call."""
        edge: Edge | None = getattr(tensor, cls._ATTRIBUTE, None)
        if edge is None:
            edge = cls()
            setattr(tensor, cls._ATTRIBUTE, edge)
            tensor.register_hook(edge)
        return edge

    def __call__(self, grad: Tensor) -> None:
        for event in (*self.retire, *self.gather):
            event(grad)


class Hooks:
    """Turns what autograd and modules do into calls on :class:`Residency` and :class:`Reducer`.

    ``backward_begins`` is called when a backward reaches this model; it returns at once if one is
    running already.
    """

    def __init__(
        self, residency: Residency, reducer: Reducer, backward_begins: Callable[[], None]
    ) -> None:
        self._residency = residency
        self._reducer = reducer
        self._backward_begins = backward_begins
        self._handles: list[RemovableHandle] = []

    def attach_root(
        self, module: nn.Module, unit: UnitState | None, forward_begins: Callable[[], None]
    ) -> None:
        """A call of the root module is a scope of its own."""

        def pre(_: nn.Module, args: tuple[Any, ...]) -> None:
            forward_begins()
            self._residency.enter_scope()
            if unit is not None:
                self._residency.need(unit)

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            failed = _raised(output)
            if not failed:
                self.watch_outputs(unit, output)
            self._residency.exit_scope(failed)

        self._handles.append(module.register_forward_pre_hook(ModuleHook(pre), prepend=True))
        self._handles.append(module.register_forward_hook(ModuleHook(post), always_call=True))

    def attach_unit(self, unit: UnitState) -> None:
        """Gather before the unit's module runs, release after it, and the mirror image in
        backward."""

        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._residency.need(unit)
            if torch.is_grad_enabled():
                self._watch_inputs(unit, (args, kwargs))

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if _raised(
                output
            ):  # the scope's end releases what is whole; nothing may be gathered now
                return
            self.watch_outputs(unit, output)
            self._residency.leave(unit)

        self._handles.append(
            unit.module.register_forward_pre_hook(ModuleHook(pre), prepend=True, with_kwargs=True)
        )
        self._handles.append(unit.module.register_forward_hook(ModuleHook(post), always_call=True))

    def attach_parameter(self, unit: UnitState, segment: SegmentState, slot: int) -> None:
        """Take each gradient from autograd as soon as it is complete."""
        param = segment.params[slot]
        hook = partial(self._on_gradient, unit, segment, slot)
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- events ------------------------------------------------------------------------------------

    def watch_outputs(self, unit: UnitState | None, output: Any) -> None:
        """Make the backward through ``output`` gather ``unit`` first."""
        if not torch.is_grad_enabled():
            return
        hook = partial(self._before_backward, unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                Edge.of(tensor).gather.append(hook)

    def _watch_inputs(self, unit: UnitState, inputs: Any) -> None:
        wanted = [t for t in tensors_in(inputs) if t.requires_grad]
        if not wanted:
            return
        unit.outstanding += 1

        def retire(_: Any) -> None:
            unit.outstanding = max(0, unit.outstanding - 1)
            if unit.outstanding == 0 and unit.complete:
                self._residency.retire(unit)

        if len(wanted) == 1:
            Edge.of(wanted[0]).retire.append(retire)
        else:
            torch.autograd.graph.register_multi_grad_hook(wanted, retire)

    def _before_backward(self, unit: UnitState | None, _: Tensor) -> None:
        self._backward_begins()
        if unit is None or not unit.sharded:
            return
        if self._residency.direction is not Direction.BACKWARD:
            self._residency.begin_pass(Direction.BACKWARD)
        self._residency.need(unit)
        if torch.is_grad_enabled():  # create_graph: a later backward will read these weights
            self._residency.hold(unit)

    def _on_gradient(
        self, unit: UnitState, segment: SegmentState, slot: int, param: nn.Parameter
    ) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return
        self._backward_begins()
        if unit.flow is Flow.REDUCING:
            self._reducer.settle(unit)
        unit.accept(segment, slot, grad)
        if unit.complete:
            self._reducer.ready(unit)
            if unit.outstanding == 0:
                self._residency.retire(unit)
