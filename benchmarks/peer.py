"""What the worker needs of every system: one training step, and the tensors that hold its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.work import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY


@dataclass
class State:
    """Tensors that hold the state between backward and the optimizer's step, as this rank holds
    them (local shards of DTensors). ``padding_bytes`` of it belong to no parameter, where known."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    optim: list[Tensor] = field(default_factory=list)
    padding_bytes: int = 0


class Peer(Protocol):
    """A system that has taken over the model; one step is ``backward`` and then ``update``."""

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Clear old gradients, forward and backward; returns this rank's loss, detached."""

    def update(self) -> None:
        """The optimizer's step, with whatever the system does beside it."""

    def state(self) -> State: ...


def fused_adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """torch's own fused AdamW at the settings of every mode."""
    return torch.optim.AdamW(
        params, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; other tensors as they are."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples; step counts (tensors without dimensions) are
    left out, they hold no element of the model."""
    if isinstance(value, Tensor):
        if value.dim():
            yield local_tensor(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def torch_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """State of a module and a torch optimizer found by walking both."""
    params = list(module.parameters())
    return State(
        params=[local_tensor(p.data) for p in params],
        grads=[local_tensor(p.grad) for p in params if p.grad is not None],
        optim=list(tensors_in(dict(optimizer.state))) if optimizer is not None else [],
    )
