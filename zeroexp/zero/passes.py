"""Passes over memory that an optimizer saves when it is one of ours: it scales gradients as it
reads them and writes the copy that computes as it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class FusesPasses(Protocol):
    """An optimizer that scales gradients as it reads them, in whatever dtype they are, and writes a
    copy in the dtype that computes as it writes."""

    grad_scale: float
    copy_out: dict[Tensor, Tensor]


@contextmanager
def fused(optimizer: Optimizer, scale: float, copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Around one step: afterwards ``copies`` (stepped tensor to its copy) hold the new values.

    An optimizer that is not :class:`FusesPasses` finds its gradients scaled already.
    """
    if not isinstance(optimizer, FusesPasses):
        yield
        for master, copy in copies.items():
            copy.copy_(master)
        return
    optimizer.grad_scale, optimizer.copy_out = scale, dict(copies)
    try:
        yield
    finally:
        optimizer.grad_scale, optimizer.copy_out = 1.0, {}


def give_gradient(optimizer: Optimizer, tensor: Tensor, grad: Tensor) -> None:
    """Set ``tensor.grad``, in the dtype it has where the optimizer reads any."""
    if isinstance(optimizer, FusesPasses) and hasattr(tensor, "grad_dtype"):  # torch 2.10
        tensor.grad_dtype = None
        tensor.grad = grad
    else:
        tensor.grad = grad.to(tensor.dtype)
