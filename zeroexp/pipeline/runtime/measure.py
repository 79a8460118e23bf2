"""What each layer costs, measured on a sample micro-batch: what a cut by time balances, and what
the simulator and the choice of a schedule are fed with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from zeroexp.pipeline.cut import Layer
from zeroexp.pipeline.runtime.message import Message, Structure
from zeroexp.pipeline.runtime.split import Chain, NamedLayer, layer_sizes
from zeroexp.pipeline.runtime.stage import Stage
from zeroexp.pipeline.runtime.tree import map_tensors

Out = TypeVar("Out")


def layer_costs(layers: Sequence[NamedLayer], sample: Any, *, repeats: int = 3) -> list[Layer]:
    """Parameters, and per micro-batch like ``sample`` the seconds of forward, input gradient and
    weight gradient (the fastest of ``repeats``), the bytes kept for backward and those sent on.

    Random numbers to be drawn, buffers and gradients of the parameters are left as they were.
    """
    state = torch.get_rng_state()
    buffers = [(b, b.clone()) for _, layer in layers for b in layer.buffers()]
    costs = []
    given: Any = sample
    for (name, module), sized in zip(layers, layer_sizes(layers), strict=True):
        held = {id(p): p.grad for p in module.parameters()}
        for parameter in module.parameters():
            parameter.grad = None
        probe = _Probe(name, module)
        trials = [probe.run(_fresh(given)) for _ in range(repeats)]
        for parameter in module.parameters():
            parameter.grad = held[id(parameter)]
        forward, input_grad, weight_grad = (min(times) for times in zip(*trials, strict=True))
        structure, tensors = probe.output
        costs.append(
            replace(
                sized,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
                activations=probe.kept,
                output=structure.payload,
            )
        )
        given = Message(structure, [tensor.detach() for tensor in tensors])
    torch.set_rng_state(state)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return costs


class _Probe:
    """One layer as a stage of its own."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._module = Chain([(name, module)])
        self.output = Message(Structure(["NoneType", None], ()), [])
        self.kept = 0

    def run(self, given: Any) -> tuple[float, float, float]:
        """Seconds of forward, input gradient, weight gradient."""
        kept: dict[int, int] = {}
        parameters = {p.untyped_storage().data_ptr() for p in self._module.parameters()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        stage = Stage(0, self._module)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            stage.forward(0, _fresh(given))
        self.kept = sum(kept.values())
        stage.forget()
        forward, result = _timed(lambda: stage.forward(0, given))
        if isinstance(result, Tensor):
            raise TypeError("a layer has no loss")
        self.output = result
        structure, tensors = result
        grads: list[Tensor | None] = [
            torch.ones_like(tensor)
            for tensor, meta in zip(tensors, structure.tensors, strict=True)
            if meta.takes_grad
        ]
        first, _ = _timed(lambda: stage.backward_input(0, grads))
        second, _ = _timed(lambda: stage.backward_weight(0))
        return forward, first, second


def _fresh(given: Any) -> Any:
    """A layer may change its input in place."""
    if isinstance(given, Message):
        return Message(given.structure, [tensor.clone() for tensor in given.tensors])
    return map_tensors(torch.clone, given)


def _timed(call: Callable[[], Out]) -> tuple[float, Out]:
    _synchronize()
    begin = time.perf_counter()
    out = call()
    _synchronize()
    return time.perf_counter() - begin, out


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
