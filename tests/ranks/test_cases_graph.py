"""Weights used twice, tied, recomputed, differentiated twice, and in two engines at once.

The ids name published cases; values come from their text or from plain torch in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import (
    STAGES,
    Scalar,
    furthest,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroexp.engine import Engine


def adam_engine(module: nn.Module, stage: int, lr: float = 0.01, **keys: Any) -> Engine:
    trained = [p for p in module.parameters() if p.requires_grad]
    return Engine(module, torch.optim.AdamW(trained, lr=lr), settings(stage, **keys))


def part(t: Tensor) -> Tensor:
    return t.chunk(world())[rank()]


class Siamese(nn.Module):
    """One layer for two inputs, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, a: Tensor, b: Tensor, how: str) -> Tensor:
        def one(x: Tensor) -> Tensor:
            if how == "plain":
                return torch.tanh(self.layer(x))
            return checkpoint(
                lambda t: torch.tanh(self.layer(t)), x, use_reentrant=how == "reentrant"
            )

        return self.last(one(a)).sum() + 2 * self.last(one(b)).sum()


def siamese_grads(stage: int, how: str, cut: str) -> dict[str, Tensor]:
    module = Siamese()
    engine = sgd_engine(module, stage, zero_unit=cut)
    a, b = (torch.full((2, 6), v + rank(), requires_grad=True) for v in (0.1, -0.2))
    engine.backward(engine(a, b, how))
    return {n: engine.full_grad(p) for n, p in module.named_parameters()}


@pytest.mark.parametrize("how", ["plain", "reentrant", "saved"])
@pytest.mark.parametrize("stage", STAGES)
def test_z310_a_layer_used_twice_with_recompute(ranks, stage, how):
    """Z3-10: both contributions, once each, for both kinds of checkpointing and two cuts."""
    module = Siamese()
    for r in range(2):
        a, b = (torch.full((2, 6), v + r, requires_grad=True) for v in (0.1, -0.2))
        (module(a, b, "plain") / 2).backward()
    wanted = {n: p.grad for n, p in module.named_parameters()}
    for cut in ("block", "leaf"):
        for grads in ranks(2)(siamese_grads, stage, how, cut):
            assert furthest(grads, wanted) <= 1e-6, cut


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def adversaries(stage: int, freeze: bool) -> list[tuple[float, float, float]]:
    g, d = Product(), Product()
    eg, ed = (sgd_engine(m, stage) for m in (g, d))
    z, real, rows = torch.tensor(1.0), torch.tensor(2.0), []
    for _ in range(3):
        ed.zero_grad()
        stale = ed.full_grad(d.w)
        ed.backward(ed(eg(z).detach()) - ed(real))
        ed.step()
        eg.zero_grad()
        d.requires_grad_(not freeze)
        eg.backward(-ed(eg(z)))
        eg.step()
        d.requires_grad_(True)
        whole = [e.state_dict().get("w", torch.tensor(0.0)) for e in (ed, eg)]
        rows.append((float(whole[0]), float(whole[1]), 0.0 if stale is None else float(stale)))
    return rows


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_z311_two_engines_in_one_backward(ranks, stage, num_ranks, freeze):
    """Z3-11, deepspeed 3.C 59, 68: a GAN of scalars; the generator's backward runs through both."""
    rows = ranks(num_ranks)(adversaries, stage, freeze)[0]
    assert [stale for *_, stale in rows] == [0.0] * 3
    assert [(d, g) for d, g, _ in rows] == [
        (pytest.approx(1.1, abs=1e-6), pytest.approx(1.11, abs=1e-6)),
        (pytest.approx(1.189, abs=1e-6), pytest.approx(1.2289, abs=1e-6)),
        (pytest.approx(1.26611, abs=1e-6), pytest.approx(1.355511, abs=1e-6)),
    ]


class TiedMLP(nn.Module):
    """Eight linear layers, the last one tied to the first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(8))
        self.layers[7].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train_tied(stage: int, hidden: int) -> dict[str, Tensor]:
    module = TiedMLP(hidden)
    engine = Engine(module, torch.optim.Adam(module.parameters(), lr=1e-3), settings(stage))
    for x, y in regression(5, 4, hidden, hidden):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("hidden", [4, 35, 36])
def test_z317_tied_weights_of_odd_sizes(ranks, hidden, num_ranks):
    """Z3-17: all stages equal one process within 1e-6; the pair stays one."""
    module = TiedMLP(hidden)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    wanted = plain_training(module, optimizer, regression(5, 4, hidden, hidden))
    for stage in STAGES:
        found = ranks(num_ranks)(train_tied, stage, hidden)[0]
        assert furthest(found, wanted) <= 1e-6, f"stage {stage}"
        assert torch.equal(found["layers.7.weight"], found["layers.0.weight"])


def backward_on_one_graph_twice(stage: int) -> float:
    module = Scalar(3.0)
    engine = sgd_engine(module, stage)
    loss = engine(2.0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    return float(engine.full_grad(module.w))


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x * x


def gradient_penalty(stage: int) -> float:
    module = Quadratic()
    engine = sgd_engine(module, stage)
    x = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(engine(x), x, create_graph=True)
    engine.backward(slope.square())
    return float(engine.full_grad(module.w))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_z319_backward_twice_and_gradient_penalty(ranks, num_ranks):
    """Z3-19: twice on one graph gives 4.0; loss = (dy/dx)^2 with y = w x^2 gives 8 w x^2 = 96."""
    for stage in STAGES:
        assert ranks(num_ranks)(backward_on_one_graph_twice, stage) == [4.0] * num_ranks
        assert ranks(num_ranks)(gradient_penalty, stage) == [96.0] * num_ranks
