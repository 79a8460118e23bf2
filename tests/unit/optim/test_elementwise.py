"""Which optimizers may be stepped over slices: known ones by identity, others by trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroexp.optim.adagrad import Adagrad
from zeroexp.optim.adamw import AdamW
from zeroexp.optim.elementwise import is_elementwise
from zeroexp.optim.lion import Lion
from zeroexp.optim.sgd import SGD


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


class LayerWise(torch.optim.Optimizer):
    """LARS-like: the update is scaled by the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * p.norm() / p.grad.norm())


class OwnMomentum(torch.optim.Optimizer):
    """Element-wise, by somebody else."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.decay = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(self.decay).add_(p.grad)
                p.sub_(m, alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        Adagrad,
        AdamW,
        Lion,
        SGD,
        OwnMomentum,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.RMSprop,
    ],
)
def test_element_wise(make: Any) -> None:
    assert is_elementwise(make(params(), lr=0.1))


@pytest.mark.parametrize("make", [LayerWise, torch.optim.Adafactor, torch.optim.LBFGS])
def test_not_element_wise(make: Any) -> None:
    assert not is_elementwise(make(params(), lr=0.1))


def test_the_trial_leaves_the_optimizer_alone() -> None:
    optimizer = OwnMomentum(params())
    assert is_elementwise(optimizer)
    (group,) = optimizer.param_groups
    assert torch.equal(group["params"][0], torch.ones(4, 4)) and not optimizer.state
