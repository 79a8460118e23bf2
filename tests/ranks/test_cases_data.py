"""Odd shapes and the order of data: cases reported against other systems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import STAGES, furthest, rank, settings, weights, world
from torch import Tensor, nn

from zeroexp.data.sampler import TrainSampler
from zeroexp.engine import Engine


class Odd(nn.Module):
    """One element, none at all, fewer elements than ranks, a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.many = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (8, 0, 24))
        self.none = nn.Linear(4, 0)
        self.only_empty = nn.ParameterList([nn.Parameter(torch.zeros(0, 3))])

    def forward(self, x: Tensor) -> Tensor:
        first, empty, last = self.many
        out = (self.one * x).sum() + (first * x.repeat(2)).square().sum() + empty.sum()
        out = out + (last * x.repeat(6)).sum() + self.none(x).sum() + self.only_empty[0].sum()
        return out


def odd_groups(module: Odd, make: Any) -> torch.optim.Optimizer:
    return make(
        [
            {"params": [module.one]},
            {"params": list(module.many)},
            {"params": list(module.none.parameters())},
            {"params": list(module.only_empty)},
        ],
        lr=0.05,
    )


def train_odd(stage: int, cut: str, kind: str) -> dict[str, Tensor]:
    module = Odd()
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    engine = Engine(module, odd_groups(module, make), settings(stage, zero_unit=cut))
    for i in range(3):
        x = torch.arange(4.0) * 0.1 + i + rank()
        engine.backward(engine(x))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_da01_parameters_smaller_than_the_world(ranks, num_ranks, kind):
    """DA-01: sizes 1, [8, 0, 24], Linear(4, 0): three steps as in one process, empty ones kept."""
    module = Odd()
    optimizer = odd_groups(module, torch.optim.SGD if kind == "sgd" else torch.optim.AdamW)
    for i in range(3):
        optimizer.zero_grad()
        for r in range(num_ranks):
            (module(torch.arange(4.0) * 0.1 + i + r) / num_ranks).backward()
        optimizer.step()
    for stage in STAGES:
        for cut in ("block", "leaf"):
            found = ranks(num_ranks)(train_odd, stage, cut, kind)[0]
            assert furthest(found, weights(module)) <= 1e-6, f"stage {stage}, {cut}"
            assert found["many.1"].shape == (0,) and found["none.weight"].shape == (0, 4)


class Small(nn.Module):
    """As many blocks as there are, each with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        for i, block in enumerate(self.blocks):
            nn.init.constant_(block.weight, 0.5 + i)
            nn.init.constant_(block.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.sum()


def train_small(stage: int) -> dict[str, Tensor]:
    module = Small()
    engine = Engine(module, torch.optim.AdamW(module.parameters(), lr=0.1), settings(stage))
    for i in range(3):
        engine.backward(engine(torch.tensor([[0.2 * i + rank() / world()]])))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_da01_units_smaller_than_the_world(ranks, num_ranks):
    module = Small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        for r in range(num_ranks):
            (module(torch.tensor([[0.2 * i + r / num_ranks]])) / num_ranks).backward()
        optimizer.step()
    for stage in STAGES:
        assert furthest(ranks(num_ranks)(train_small, stage)[0], weights(module)) <= 1e-6


def epochs(seed: int) -> list[list[list[int]]]:
    """Two epochs of the sequences of both ranks."""
    out = []
    samplers = [TrainSampler(8, 4, data_rank=r, data_ranks=2, seed=seed) for r in range(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        out.append([[i for batch in sampler for i in batch] for sampler in samplers])
    return out


def test_da04_shuffling_differs_by_epoch_and_is_disjoint_over_ranks():
    """DA-04: 8 samples, 2 ranks, 2 epochs: all of them each epoch, in another order, repeatable."""
    found = epochs(0)
    for ranks_of_epoch in found:
        a, b = ranks_of_epoch
        assert sorted(a + b) == list(range(8)) and not set(a) & set(b)
    assert found[0] != found[1]
    assert found == epochs(0) and found != epochs(1)
