"""A stage: a part of the model, and what it keeps of every micro-batch from forward to backward.

A stage's module takes one argument and returns one value, both nested values of tensors (see
:mod:`.tree`). What it keeps is the graph alone: an output is gone once it is sent, unless the graph
saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeroexp.errors import ModelError, RankMismatch
from zeroexp.pipeline.runtime.message import Message, Structure, TensorMeta, describe
from zeroexp.pipeline.runtime.split_backward import SplitBackward
from zeroexp.zero.companion import Forward

Context = Callable[[], AbstractContextManager[Any]]

LossOf = Callable[[Any], Tensor]
"""A micro-batch's loss from the last stage's output."""

Call = Callable[[nn.Module, Any, Forward], Any]
"""Calls a stage's module with its argument."""


def plain_call(module: nn.Module, value: Any, kind: Forward) -> Any:
    """The module's result."""
    return module(value)


class _Receive(torch.autograd.Function):
    """Where a stage's graph ends towards the stage before: leaves in ``box`` what gradients come.

    No leaf tensors: a module may change its input in place, a leaf may not be changed so.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, box: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.box = box
        return tuple(tensor.data for tensor in tensors)  # not views: those refuse in-place changes

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.box[:] = grads
        return (None,) * (2 + len(grads))


@dataclass
class _Pass:
    """One micro-batch between forward and backward."""

    outputs: list[TensorMeta] = field(default_factory=list)
    """Those that a gradient comes back for."""
    places: list[int] | None = None
    """Where they are among all outputs, if that was said before there was a graph."""
    count: int = 0
    """How many outputs there were then."""
    roots: list[GradientEdge | None] = field(default_factory=list)
    """Where their gradients go; the loss on the last stage."""
    inputs: list[GradientEdge] = field(default_factory=list)
    box: list[Tensor | None] = field(default_factory=list)
    half: SplitBackward | None = None
    again: Callable[[], None] | None = None
    """Makes the graph, where the forward kept none."""


class Stage:
    """Stage ``index`` of the model. ``names`` are its parameters' names in the whole model by their
    names in ``module`` (default: the same).

    ``recompute``: a micro-batch keeps its input alone, and backward runs forward again, with the
    same random numbers (Chen et al., arXiv:1604.06174) and inside ``context()`` (autocast, say).
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        names: dict[str, str] | None = None,
        recompute: bool = False,
        context: Context = nullcontext,
    ) -> None:
        self.index = index
        self._context = context
        self.module = module
        self.recompute = recompute
        self.call: Call = plain_call
        """How the module is called; what travels between stages beside its values is added here."""
        parameters = dict(module.named_parameters())
        self.names = names or {name: name for name in parameters}
        first = next(iter(parameters.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._passes: dict[int, _Pass] = {}
        self._start = torch.zeros((), device=self.device, requires_grad=True)
        self.peak_in_flight = 0
        """The most micro-batches that were between forward and backward since :meth:`forget`."""

    @property
    def in_flight(self) -> int:
        """Micro-batches with a forward and an unfinished backward."""
        return len(self._passes)

    def refuse_if_empty(self) -> None:
        """Raises :class:`ModelError` for a module without parameters."""
        if next(self.module.parameters(), None) is None:
            raise ModelError(
                f"stage {self.index} has no parameters: cut the model so that each stage has some, "
                "or use fewer stages"
            )

    def refuse_what_cannot_split(self) -> None:
        """Raises :class:`ModelError` naming a module whose backward hook needs the gradients of
        inputs and weights at once."""
        for name, module in self.module.named_modules():
            if module._backward_hooks and not module._is_full_backward_hook:
                raise ModelError(
                    f"stage {self.index}, module {name or 'itself'}: a hook of "
                    "register_backward_hook sees the gradients of inputs and weights together and "
                    "cannot be split. Use register_full_backward_hook, or a schedule that does not "
                    "split the backward (1f1b, gpipe, interleaved, breadth_first)"
                )

    # -- forward -----------------------------------------------------------------------------------

    def forward(
        self, micro_batch: int, given: Message | Any, loss_of: LossOf | None = None
    ) -> Message | Tensor:
        """The output, or on the last stage (``loss_of``) the loss, detached.

        ``given`` is what the stage before sent, or on the first stage any value.
        """
        made = _Pass()
        run = self._run_without_graph if self.recompute else self._run
        result = run(made, given, loss_of)
        self._passes[micro_batch] = made
        self.peak_in_flight = max(self.peak_in_flight, len(self._passes))
        return result

    def evaluate(
        self, given: Message | Any, loss_of: LossOf | None, kind: Forward = Forward.WHOLE
    ) -> tuple[Any, Tensor | None]:
        """Output and loss without a backward to come."""
        with torch.no_grad():
            value = given.value if isinstance(given, Message) else given
            output = self.call(self.module, value, kind)
            return output, None if loss_of is None else loss_of(output)

    def _run(
        self,
        made: _Pass,
        given: Message | Any,
        loss_of: LossOf | None,
        kind: Forward = Forward.WHOLE,
    ) -> Message | Tensor:
        output = self.call(self.module, self._entered(made, given), kind)
        if loss_of is not None:
            loss = loss_of(output)
            self._check_loss(loss)
            made.roots = [get_gradient_edge(loss)]
            return loss.detach()
        structure, tensors = describe(output)
        places = made.places
        if places is not None and made.count != len(tensors):
            raise ModelError(
                f"stage {self.index} gave {made.count} tensors, and {len(tensors)} when its "
                "forward ran again: checkpoint(..., use_reentrant=True) inside a stage that "
                "recomputes does that; use use_reentrant=False"
            )
        if places is None:
            places = [i for i, meta in enumerate(structure.tensors) if meta.takes_grad]
            made.outputs = [structure.tensors[i] for i in places]
        made.roots = [
            get_gradient_edge(tensors[i]) if tensors[i].requires_grad else None for i in places
        ]
        return Message(structure, tensors)

    def _entered(self, made: _Pass, given: Message | Any) -> Any:
        """The module's argument, with this micro-batch's end of the graph in it."""
        if not isinstance(given, Message):
            return given
        structure, tensors = given
        takes = [i for i, meta in enumerate(structure.tensors) if meta.takes_grad]
        if takes:
            tensors = list(tensors)
            made.box = [None] * len(takes)
            entered = _Receive.apply(  # type: ignore[no-untyped-call]
                self._start, made.box, *(tensors[i] for i in takes)
            )
            for i, tensor in zip(takes, entered, strict=True):
                tensors[i] = tensor
            made.inputs = [get_gradient_edge(tensor) for tensor in entered]
        return Message(structure, tensors).value

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"the loss must be a scalar tensor, got {shape}; reduce it with .mean() or .sum()"
            )
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on any trainable parameter: it has no graph. Is it "
                "detached, or is everything frozen?"
            )

    def _run_without_graph(
        self, made: _Pass, given: Message | Any, loss_of: LossOf | None
    ) -> Message | Tensor:
        random = _random_state(self.device)
        entered = given[1] if isinstance(given, Message) else []
        versions = [tensor._version for tensor in entered]
        output, loss = self.evaluate(given, loss_of, Forward.FIRST)
        if versions != [tensor._version for tensor in entered]:
            raise ModelError(
                f"stage {self.index} changes its input in place, so its forward cannot run again: "
                "turn recompute off for it, or make the change a copy"
            )

        def again() -> None:
            now = _random_state(self.device)
            _set_random_state(self.device, random)
            try:
                with torch.enable_grad(), self._context():
                    self._run(made, given, loss_of, Forward.AGAIN)
            finally:
                _set_random_state(self.device, now)

        made.again = again
        if loss is not None:
            return loss
        structure, tensors = describe(output)
        metas = [
            replace(meta, takes_grad=self._may_take_grad(given, tensor))
            for meta, tensor in zip(structure.tensors, tensors, strict=True)
        ]
        made.count = len(tensors)
        made.places = [i for i, meta in enumerate(metas) if meta.takes_grad]
        made.outputs = [metas[i] for i in made.places]
        return Message(Structure(structure.shape, tuple(metas)), tensors)

    def _may_take_grad(self, given: Message | Any, output: Tensor) -> bool:
        """Without a graph nothing says which outputs will have one: all that can, do. A gradient
        for one that turns out to have none is dropped."""
        entered = {}
        if isinstance(given, Message):
            metas = given[0].tensors
            entered = {id(t): m.takes_grad for t, m in zip(given[1], metas, strict=True)}
        if id(output) in entered:
            return entered[id(output)]
        trains = any(p.requires_grad for p in self.module.parameters()) or any(entered.values())
        return trains and (output.is_floating_point() or output.is_complex())

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, micro_batch: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The whole backward: the gradients of the inputs that take one. ``grads`` are those of the
        outputs that take one (of the loss, on the last stage)."""
        made = self._passes[micro_batch]
        roots, grads = self._roots(made, grads)
        if roots:
            torch.autograd.backward(roots, grads)
        del self._passes[micro_batch]
        return made.box

    def backward_input(
        self, micro_batch: int, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The first half: the same gradients; parameters get none yet."""
        made = self._passes[micro_batch]
        roots, grads = self._roots(made, grads)
        made.half = SplitBackward(roots, grads, made.inputs)
        made.roots = []
        try:
            return made.half.input_grads()
        except ModelError as error:
            raise ModelError(f"stage {self.index}: {error}") from error

    def backward_weight(self, micro_batch: int) -> None:
        """The second half."""
        half = self._passes[micro_batch].half
        if half is not None:
            half.weight_grads()
        del self._passes[micro_batch]

    def _roots(
        self, made: _Pass, grads: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        if made.again is not None:
            made.again()
            made.again = None
        if len(grads) != len(made.roots):
            raise RankMismatch(
                f"stage {self.index} has {len(made.roots)} outputs with gradients, the stage "
                f"behind sent {len(grads)} gradients"
            )
        for number, (grad, meta) in enumerate(zip(grads, made.outputs, strict=False)):
            if grad is not None and tuple(grad.shape) != meta.shape:
                raise RankMismatch(
                    f"output {number} of stage {self.index} has shape {meta.shape}, its gradient "
                    f"came with shape {tuple(grad.shape)}"
                )
        pairs = [
            (root, grad)
            for root, grad in zip(made.roots, grads, strict=True)
            if root is not None and grad is not None
        ]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def forget(self) -> None:
        """Drop what is kept of micro-batches, and the peak."""
        self._passes.clear()
        self.peak_in_flight = 0


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
