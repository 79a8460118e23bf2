"""The update rules under one face: parameter, gradient, and one state tensor, which not all use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.unit.ops.exact import ulp
from zeroexp import ops

State = tuple[Tensor, Tensor, Tensor]
"""Parameter, gradient, and momentum or sum of squares (not negative)."""

Step = Callable[..., None]
"""Steps a :data:`State` in place; takes ``grad_scale`` and ``copy_out``."""


def _plain(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.sgd_(p, g, lr=0.1, weight_decay=0.01, **options)


def _momentum(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.sgd_(p, g, state, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01, **options)


def _nesterov(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.sgd_(p, g, state, lr=0.1, momentum=0.9, nesterov=True, **options)


def _first(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.sgd_(p, g, state, lr=0.1, momentum=0.9, first=True, **options)


def _adagrad(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.adagrad_(p, g, state, step=3, lr=0.1, lr_decay=0.5, weight_decay=0.01, **options)


def _lion(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    ops.lion_(p, g, state, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, **options)


def _adamw(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    """The state is the second moment; the first one lasts for this step."""
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    ops.adamw_(p, g, state * 0.5, state, step=3, **hyper, **options)


def _adam(p: Tensor, g: Tensor, state: Tensor, **options: Any) -> None:
    _adamw(p, g, state, decoupled=False, **options)


STEPS: Mapping[str, Step] = {
    "sgd": _plain,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "first": _first,
    "adagrad": _adagrad,
    "lion": _lion,
    "adamw": _adamw,
    "adam": _adam,
}


def make_state(size: int, seed: int = 0, grad_scale: float = 1e-3) -> State:
    """A run that has gone on for a while."""
    random = torch.Generator().manual_seed(seed)
    p = torch.randn(size, generator=random)
    g = torch.randn(size, generator=random) * grad_scale
    state = torch.rand(size, generator=random) * grad_scale
    return p, g, state


def stepped(step: Step, state: State, **options: Any) -> State:
    """The same, one step on, in tensors of their own."""
    p, g, s = (t.clone() for t in state)
    step(p, g, s, **options)
    return p, g, s


def torch_stepped(
    state: State, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], **held: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Parameter and state after a step of torch's ``optimizer`` that holds ``held``."""
    leaf = torch.nn.Parameter(state[0].clone())
    leaf.grad = state[1].clone()
    made = optimizer([leaf])
    made.state[leaf] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in held.items()}
    made.step()
    return leaf.detach(), made.state[leaf]


def within_one_ulp(new: Tensor, want: Tensor, old: Tensor, exact_root: bool = True) -> None:
    """|new - want| is at most one fp32 spacing at max(|p|, |update|), p before and after.

    torch.sqrt over a tensor (MKL) errs by up to 0.75 units where IEEE asks for 0.5. Without
    ``exact_root`` the root may differ by a unit, and each of the three operations after it may then
    round the other way.
    """
    update = (want.double() - old.double()).abs()
    scale = torch.stack([old.double().abs(), want.double().abs(), update]).amax(0)
    allowed = ulp(scale) + (0 if exact_root else 4) * update * 2.0**-23
    error = (new.double() - want.double()).abs()
    worst = (error / allowed).max() if len(error) else torch.zeros(())
    assert worst <= 1, f"{worst:.2f} of what is allowed"
