"""The other kernels that pass over memory once, and what torch does in their place: the updates of
SGD, Adagrad and Lion, a bf16 gradient that is divided and added to its fp32 buffer, gradients that
are scaled, cast and checked, the look for edited parameters, and the checksum of a swap file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.adamw import Contender, fresh
from zeroexp import ops
from zeroexp.ops.edits import adopt_edits_in_torch
from zeroexp.ops.lion import lion_in_torch_

Shapes = list[tuple[int, ...]]
DIVISOR = 8.0


def sgd(shapes: Shapes) -> dict[str, Contender]:
    """With momentum."""
    p, g, buffer, low = _flat(shapes)

    def step(copy: Tensor | None) -> None:
        ops.sgd_(p, g, buffer, lr=1e-3, momentum=0.9, weight_decay=0.1, copy_out=copy)

    options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}
    return _beside(step, low, shapes, torch.optim.SGD, options)


def adagrad(shapes: Shapes) -> dict[str, Contender]:
    p, g, total, low = _flat(shapes)

    def step(copy: Tensor | None) -> None:
        ops.adagrad_(p, g, total, step=2, lr=1e-3, weight_decay=0.1, copy_out=copy)

    options = {"lr": 1e-3, "weight_decay": 0.1}
    return _beside(step, low, shapes, torch.optim.Adagrad, options)


def lion(shapes: Shapes) -> dict[str, Contender]:
    """torch has no Lion: its operations one after the other, tensor by tensor."""
    p, g, m, low = _flat(shapes)
    params, grads = fresh(shapes, 1.0), fresh(shapes, 1e-3)
    moments = [torch.zeros_like(t) for t in params]
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}

    def by_torch() -> None:
        for tensors in zip(params, grads, moments, strict=True):
            lion_in_torch_(*tensors, **hyper)

    return {
        "zeroexp huge": lambda: ops.lion_(p, g, m, **hyper),
        "zeroexp huge + bf16 copy": lambda: ops.lion_(p, g, m, copy_out=low, **hyper),
        "torch's operations": by_torch,
    }


def arrival(shapes: Shapes) -> dict[str, Contender]:
    """A gradient of a later micro-batch on its way into the buffer, parameter by parameter."""
    buffers = fresh(shapes, 1e-3)
    grads = [g.bfloat16() for g in fresh(shapes, 1e-3)]
    divisor = torch.tensor(DIVISOR)

    def ours() -> None:
        for buffer, grad in zip(buffers, grads, strict=True):
            ops.divide_into(buffer, grad, DIVISOR, add=True)

    def by_torch() -> None:
        for buffer, grad in zip(buffers, grads, strict=True):
            buffer.add_(grad.float() / divisor)

    return {"zeroexp": ours, "torch's operations": by_torch}


def cast(shapes: Shapes) -> dict[str, Contender]:
    """An fp32 gradient to bf16, with the norm that says whether it is finite."""
    g, _, _, low = _flat(shapes)

    def by_torch() -> None:
        low.copy_(g * 0.5)
        float(torch.linalg.vector_norm(low, dtype=torch.float64))

    return {
        "zeroexp huge": lambda: _drop(ops.scale_cast(low, g, 0.5)),
        "torch's operations": by_torch,
    }


def edits(shapes: Shapes) -> dict[str, Contender]:
    """Parameters that nobody edited; the sums of squares of both tensors only read the same."""
    master, _, _, low = _flat(shapes)
    low.copy_(master)
    return {
        "zeroexp huge": lambda: _drop(ops.adopt_edits(master, low)),
        "two sums of squares": lambda: _drop(ops.sum_squares(master) + ops.sum_squares(low)),
        "torch's operations": lambda: _drop(adopt_edits_in_torch(master, low)),
    }


def checksum(shapes: Shapes) -> dict[str, Contender]:
    """One thread, whatever the case says; the sum of squares only reads the same."""
    data, _, _, _ = _flat(shapes)
    return {
        "zeroexp huge": lambda: _drop(ops.checksum(data)),
        "sum of squares": lambda: _drop(ops.sum_squares(data)),
    }


PASSES: Mapping[str, Callable[[Shapes], dict[str, Contender]]] = {
    "SGD with momentum": sgd,
    "Adagrad": adagrad,
    "Lion": lion,
    "bf16 gradient into fp32": arrival,
    "fp32 gradient scaled to bf16": cast,
    "look for edits": edits,
    "checksum": checksum,
}


def _flat(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient, state and low-precision copy on huge pages, as a shard holds them."""
    size = sum(torch.Size(s).numel() for s in shapes)
    p, g, state = (ops.host_zeros(size, torch.float32) for _ in range(3))
    p.normal_()
    g.normal_().mul_(1e-3)
    return p, g, state, ops.host_zeros(size, torch.bfloat16)


def _beside(
    step: Callable[[Tensor | None], None],
    low: Tensor,
    shapes: Shapes,
    kind: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
) -> dict[str, Contender]:
    """Our step with and without a copy beside torch's optimizer over tensors of ``shapes``."""
    leaves = [torch.nn.Parameter(p) for p in fresh(shapes, 1.0)]
    for leaf, grad in zip(leaves, fresh(shapes, 1e-3), strict=True):
        leaf.grad = grad
    fused = kind(leaves, **options, fused=True)
    foreach = kind(leaves, **options, foreach=True)
    lows = [torch.empty_like(leaf, dtype=torch.bfloat16) for leaf in leaves]

    @torch.no_grad()
    def fused_copy() -> None:
        fused.step()
        for to, leaf in zip(lows, leaves, strict=True):
            to.copy_(leaf)

    return {
        "zeroexp huge": lambda: step(None),
        "torch fused": lambda: _step(fused),
        "torch foreach": lambda: _step(foreach),
        "zeroexp huge + bf16 copy": lambda: step(low),
        "torch fused + copy_": fused_copy,
    }


def _drop(result: object) -> None:
    """A contender returns nothing."""


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
