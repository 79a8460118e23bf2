"""Activations of the built-in experts, with derivatives that need no graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """Element-wise in ``inputs`` tensors of one shape.

    ``forward`` ``(*pre)`` makes the result, ``backward`` ``(grad, *pre)`` the gradient of each
    input; both make new tensors.
    """

    inputs: int
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]


def _gelu_backward(grad: Tensor, pre: Tensor) -> tuple[Tensor]:
    return (_aten.gelu_backward(grad, pre),)


def _relu_backward(grad: Tensor, pre: Tensor) -> tuple[Tensor]:
    return (_aten.threshold_backward(grad, pre, 0),)


def _silu_backward(grad: Tensor, pre: Tensor) -> tuple[Tensor]:
    return (_aten.silu_backward(grad, pre),)


def _swiglu(up: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_backward(grad: Tensor, up: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return grad * F.silu(gate), _aten.silu_backward(grad * up, gate)


ACTIVATIONS = {
    "gelu": Activation(1, F.gelu, _gelu_backward),
    "relu": Activation(1, F.relu, _relu_backward),
    "silu": Activation(1, F.silu, _silu_backward),
    "swiglu": Activation(2, _swiglu, _swiglu_backward),
}
