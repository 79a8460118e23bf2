"""Passes over memory that an optimizer saves when it is one of ours: it scales gradients as it
reads them and writes the copy that computes as it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class FusesPasses(Protocol):
    """An optimizer that scales gradients as it reads them, in whatever dtype they are, and writes a
    copy in the dtype that computes as it writes."""

    grad_scale: float
    copy_out: dict[Tensor, Tensor]


def settings(optimizer: Optimizer, scale: float, copies: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """The attributes by which ``optimizer`` saves the passes in one step; none if it does not."""
    if not isinstance(optimizer, FusesPasses):
        return {}
    return {"grad_scale": scale, "copy_out": dict(copies)}


@contextmanager
def fused(optimizer: Optimizer, scale: float, copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Around one step: afterwards ``copies`` (stepped tensor to its copy) hold the new values.

    An optimizer that is not :class:`FusesPasses` finds its gradients scaled already.
    """
    saved = settings(optimizer, scale, copies)
    optimizer.__dict__.update(saved)
    try:
        yield
    finally:
        optimizer.__dict__.update(settings(optimizer, 1.0, {}))
    if not saved:
        write_copies(copies)


def write_copies(copies: Mapping[Tensor, Tensor]) -> None:
    """The pass that brings new values from each stepped tensor to its copy."""
    for master, copy in copies.items():
        copy.copy_(master)


def give_gradient(optimizer: Optimizer, tensor: Tensor, grad: Tensor) -> None:
    """Set ``tensor.grad``, in the dtype it has where the optimizer reads any."""
    if isinstance(optimizer, FusesPasses) and hasattr(tensor, "grad_dtype"):  # torch 2.10
        tensor.grad_dtype = None
        tensor.grad = grad
    else:
        tensor.grad = grad.to(tensor.dtype)
