"""Where the runtime meets the user's module: hooks on modules, on their inputs and outputs, and on
gradients."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroexp.errors import ModelError
from zeroexp.zero.access import ModuleHook
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.residency import Direction, Residency
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.unit import Call, Flow, Life, UnitState


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

    def __init__(self, version: int) -> None:
        self.version = version
        self.retire: list[Callable[[Any], None]] = []
        self.gather: list[Callable[[Any], None]] = []

    @classmethod
    def of(cls, tensor: Tensor) -> Edge:
        """The edge of ``tensor`` as it is now: one that was changed in place since is another
        activation."""
        edge: Edge | None = tensor.__dict__.get(cls._ATTRIBUTE)
        if edge is None or edge.version != tensor._version:
            edge = tensor.__dict__[cls._ATTRIBUTE] = cls(tensor._version)
            tensor.register_hook(edge)
        return edge

    def __call__(self, grad: Tensor) -> None:
        for event in self.retire:
            event(grad)
        for event in self.gather:
            event(grad)


class Arrival:
    """Takes the complete gradient of one parameter from autograd."""

    __slots__ = ("__weakref__", "_hooks", "_segment", "_slot", "_unit")

    def __init__(self, hooks: Hooks, unit: UnitState, segment: SegmentState, slot: int) -> None:
        self._hooks, self._unit, self._segment, self._slot = hooks, unit, segment, slot

    def __call__(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        unit = self._unit
        self._hooks.gradient_arrives(unit, self._segment, self._slot)
        unit.accept(
            self._segment.grads, self._slot, param, grad.detach() if grad.requires_grad else grad
        )
        if unit.complete:
            self._hooks.unit_complete(unit)


class Hooks:
    """Turns what autograd and modules do into calls on :class:`Residency` and :class:`Reducer`.

    ``walk_begins`` is called when autograd reaches this model, ``backward_begins`` when it leaves a
    gradient on a parameter (``autograd.grad`` never does). Both return at once in a backward that
    runs already.
    """

    def __init__(
        self,
        residency: Residency,
        reducer: Reducer,
        walk_begins: Callable[[], None],
        backward_begins: Callable[[], None],
    ) -> None:
        self._residency = residency
        self._reducer = reducer
        self._walk_begins = walk_begins
        self._backward_begins = backward_begins
        self._root: UnitState | None = None
        self._handles: list[RemovableHandle] = []
        self._arrivals: list[Arrival] = []

    def attach_root(
        self, module: nn.Module, unit: UnitState | None, forward_begins: Callable[[], None]
    ) -> None:
        """A call of the root module is a scope of its own."""
        self._root = unit
        if unit is not None and unit.transient:
            self._attach_inner(unit)

        def pre(_: nn.Module, args: tuple[Any, ...]) -> None:
            forward_begins()
            self._residency.enter_scope()
            self._residency.need_root()

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            failed = _raised(output)
            if not failed:
                self._watch_outputs(unit, None, output)
            self._residency.exit_scope(failed)

        self._handles.append(module.register_forward_pre_hook(ModuleHook(pre), prepend=True))
        self._handles.append(module.register_forward_hook(ModuleHook(post), always_call=True))

    def attach_unit(self, unit: UnitState) -> None:
        """Gather before the unit's module runs, release after it, and the mirror image in
        backward."""
        self._attach_inner(unit)

        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call()
            unit.calls.append(call)
            self._residency.need(unit)
            if torch.is_grad_enabled():
                self._watch_inputs(unit, call, (args, kwargs))

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = unit.calls.pop() if unit.calls else None
            if _raised(
                output
            ):  # the scope's end releases what is whole; nothing may be gathered now
                return
            self._watch_outputs(unit, call, output)
            self._residency.leave(unit)
            if self._residency.direction is Direction.BACKWARD:
                self._recomputed(unit, output)

        self._handles.append(
            unit.module.register_forward_pre_hook(ModuleHook(pre), prepend=True, with_kwargs=True)
        )
        self._handles.append(unit.module.register_forward_hook(ModuleHook(post), always_call=True))

    def _attach_inner(self, unit: UnitState) -> None:
        """A backward may enter ``unit`` anywhere: a loss kept on a module, an activation caught by
        a hook, an output inside an object of the user's own. Each module with parameters gathers
        for itself."""
        own = {id(p) for s in unit.segments for p in s.params}

        hook = partial(self._before_backward, unit, None)

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
                if tensor.grad_fn is not None:
                    Edge.of(tensor).gather.append(hook)

        for module in unit.module.modules():
            table = dict.values(module._parameters)
            if module is not unit.module and any(id(p) in own for p in table):
                self._handles.append(module.register_forward_hook(ModuleHook(post)))

    def attach_parameter(self, unit: UnitState, segment: SegmentState, slot: int) -> None:
        """Take each gradient from autograd as soon as it is complete."""
        arrival = Arrival(self, unit, segment, slot)
        self._arrivals.append(arrival)
        # Weak: torch hides the hooks of a parameter from the garbage collector, so a hook that
        # reaches the engine would keep it, and all of its memory and threads, for ever.
        reference = weakref.ref(arrival)

        def hook(param: Tensor) -> None:
            if (alive := reference()) is not None:
                alive(param)

        self._handles.append(segment.params[slot].register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- events ------------------------------------------------------------------------------------

    def _watch_outputs(self, unit: UnitState | None, call: Call | None, output: Any) -> None:
        """Make the backward through ``output`` gather ``unit`` first."""
        if not (self._residency.gathers and torch.is_grad_enabled()):
            return
        hook = partial(self._before_backward, unit, call)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                Edge.of(tensor).gather.append(hook)

    def _watch_inputs(self, unit: UnitState, call: Call, inputs: Any) -> None:
        wanted = [t for t in tensors_in(inputs) if t.requires_grad]
        if not wanted:
            return
        unit.outstanding += 1
        call.watched = True
        if self._residency.direction is not Direction.BACKWARD:
            # A leaf outlives the graph, and hooks on it would pile up. What is computed from it
            # inside the unit is through when the gradients of other inputs are; without others
            # the end of the pass releases the unit.
            wanted = [t for t in wanted if t.grad_fn is not None]

        def retire(_: Any) -> None:
            unit.open.discard(call)
            unit.outstanding = max(0, unit.outstanding - 1)
            if unit.outstanding == 0 and not unit.open and unit.complete:
                self._residency.retire(unit)

        if len(wanted) == 1:
            Edge.of(wanted[0]).retire.append(retire)
        elif wanted:
            torch.autograd.graph.register_multi_grad_hook(wanted, retire)

    def _recomputed(self, unit: UnitState, output: Any) -> None:
        """A recomputation is over: where nothing of it wants a gradient (a frozen backbone) no
        backward of the unit will release it."""
        busy = unit.outstanding or unit.open or unit.calls
        if not busy and not any(t.requires_grad for t in tensors_in(output)):
            self._residency.retire(unit)

    def _before_backward(self, unit: UnitState | None, call: Call | None, _: Tensor) -> None:
        residency = self._residency
        if residency.direction is not Direction.BACKWARD:
            self._walk_begins()
            residency.begin_pass(Direction.BACKWARD)
            residency.need_root()
        if unit is None:
            return
        if call is not None and call.watched:
            unit.open.add(call)
        if unit.life is not Life.WHOLE or not residency.was_needed(unit):
            residency.need(unit)
        if torch.is_grad_enabled():  # create_graph: a later backward will read these weights
            residency.hold(unit)

    def gradient_arrives(self, unit: UnitState, segment: SegmentState, slot: int) -> None:
        """Autograd has completed a gradient of ``unit``. Raises :class:`ModelError` where it was
        computed from placeholders."""
        self._backward_begins()
        if unit.life is not Life.WHOLE and not self._residency.was_needed(unit):
            raise ModelError(
                f"the backward reached {segment.spec.slots[slot].spec.name} while the parameters "
                f"of unit {unit.label} are sharded, so its gradients would be wrong. The graph "
                "leads into the unit past the outputs of its modules: return what the loss needs "
                "from forward(), read the parameter inside the forward of the root module or "
                "engine.scope(), or use zero.stage 2."
            )
        if unit.flow is Flow.REDUCING:
            self._reducer.settle(unit)

    def unit_complete(self, unit: UnitState) -> None:
        """All gradients of ``unit`` have arrived."""
        self._reducer.ready(unit)
        if unit.done_with_gradients and unit is not self._root:
            self._residency.retire(unit)
