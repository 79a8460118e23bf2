"""Cases reported against FSDP: norms over shards, frozen and tied weights, loads in mid-step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formula import sizes
from small import (
    STAGES,
    Scalar,
    furthest,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine


def spread_norm(stage: int, keys: dict[str, Any]) -> tuple[float, float]:
    """A gradient of 3 in the first 16 elements (shard of rank 0) and of 4 in the next 16."""
    module = Scalar(*[0.0] * 32)
    engine = sgd_engine(module, stage, **keys)
    slope = torch.zeros(32)
    slope[3], slope[20] = 3.0, 4.0
    engine.backward(engine(slope))
    norm = engine.clip_norm(1e9)
    return norm, float(engine.grad_norm)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fs01_the_norm_is_that_of_all_shards(ranks, num_ranks):
    """FS-01, PL-05: 5 on both ranks, not 3 and 4."""
    for stage in STAGES:
        found = ranks(num_ranks)(spread_norm, stage, {})
        assert found == [(pytest.approx(5.0), pytest.approx(5.0))] * num_ranks


@pytest.mark.parametrize(("num_ranks", "shard_size"), [(2, 1), (4, 2)])
def test_fs02_replicas_are_counted_once(ranks, num_ranks, shard_size):
    """FS-02: groups that hold the same shard do not add up in the norm."""
    found = ranks(num_ranks)(spread_norm, 3, {"zero_shard_size": shard_size})
    assert found == [(pytest.approx(5.0), pytest.approx(5.0))] * num_ranks


def low_precision_norm(stage: int) -> float:
    module = Scalar(*[0.0] * 10_000, dtype=torch.bfloat16)
    engine = sgd_engine(
        module, stage, compute="bf16", precision_accumulate="bf16", precision_reduce="bf16"
    )
    engine.backward(engine(torch.full((10_000,), 1e-3)))
    return engine.clip_norm(1e9)


def test_fs02_the_norm_of_bf16_gradients_is_summed_in_full_precision(ranks):
    """FS-02: 10 000 gradients of 1e-3 (as bf16) have the norm 0.1 within 1e-3, at every stage."""
    value = float(torch.tensor(1e-3).bfloat16())
    for stage in STAGES:
        for found in ranks(2)(low_precision_norm, stage):
            assert found == pytest.approx(100 * value, rel=1e-3)


class Adapted(nn.Module):
    """A frozen and a trained linear layer in one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(10, 10)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(torch.tanh(self.base(x)))


def adapt(stage: int) -> dict[str, Any]:
    module = nn.Sequential(Adapted(), Adapted())
    trained = [p for p in module.parameters() if p.requires_grad]
    engine = Engine(module, torch.optim.AdamW(trained, lr=0.01), settings(stage))
    for x, y in regression(4, 8, 10, 10):
        a, b = (t.chunk(world())[rank()] for t in (x, y))
        engine.backward(F.mse_loss(engine(a), b))
        grads = sum(engine.ledger.state_bytes()["grads"].values())
        engine.step()
    return {"whole": engine.state_dict(), "grads": grads}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_fs04_frozen_and_trained_weights_in_one_unit(ranks, stage, num_ranks):
    """FS-04, deepspeed 3.C 38: frozen bits stay, only trained weights have gradient memory."""
    module = nn.Sequential(Adapted(), Adapted())
    start = weights(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    wanted = plain_training(module, torch.optim.AdamW(trained, lr=0.01), regression(4, 8, 10, 10))
    found = ranks(num_ranks)(adapt, stage)
    whole = found[0]["whole"]
    assert furthest(whole, wanted) <= 1e-6
    frozen = [name for name in start if ".base." in name]
    assert all(torch.equal(whole[name], start[name]) for name in frozen)
    padded = sizes(module, num_ranks, trainable=True).padded
    parts = num_ranks if stage >= 2 else 1
    assert [each["grads"] for each in found] == [4 * padded // parts] * num_ranks


def load_between(stage: int) -> tuple[dict[str, Tensor], float]:
    """Whole weights after a step of 0, and what the model then says of ones."""
    module = mlp_of_ones()
    engine = sgd_engine(module, stage, lr=0.0)
    loss = engine(torch.ones(1, 4)).sum()
    new = {name: torch.full_like(t, 2.0) for name, t in mlp_of_ones().state_dict().items()}
    engine.load_state_dict(new)
    engine.backward(loss)
    engine.step()
    whole = engine.state_dict()
    with torch.no_grad():
        return whole, float(engine(torch.ones(1, 4)).sum())


def mlp_of_ones() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


@pytest.mark.parametrize("stage", STAGES)
def test_fs05_weights_loaded_between_forward_and_backward(ranks, stage):
    """FS-05: the loaded 2.0 is there after step(lr=0), and is what the next forward uses."""
    found = ranks(2)(load_between, stage)
    whole = found[0][0]
    assert set(whole) == set(mlp_of_ones().state_dict())
    assert all(bool((t == 2.0).all()) for t in whole.values())
    hidden = 4 * 2.0 + 2.0
    assert [out for _, out in found] == [2 * (4 * 2.0 * hidden + 2.0)] * 2


class Tied(nn.Module):
    """Embedding and head share a weight and sit in two units of the cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            [nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)]
        )
        self.parts[2].weight = self.parts[0].weight

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.parts[1](self.parts[0](rows)))
        return self.parts[2](hidden)


def train_tied(stage: int, cut: str) -> tuple[dict[str, Tensor], bool]:
    module = Tied()
    engine = Engine(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), settings(stage, zero_unit=cut)
    )
    for i in range(3):
        rows = torch.arange(8).chunk(world())[rank()] + i
        engine.backward(F.cross_entropy(engine(rows), (rows + 1) % 11))
        engine.step()
    with zeroexp.gathered(module):
        same = torch.equal(module.parts[0].weight, module.parts[2].weight)
        same = same and module.parts[0].weight is module.parts[2].weight
    return engine.state_dict(), same


@pytest.mark.parametrize("cut", ["block", "leaf", "parts.0,parts.2"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fs07_tied_weights_across_units(ranks, cut, num_ranks):
    """FS-07: still one weight after three steps, equal to one process."""
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for i in range(3):
        rows = torch.arange(8) + i
        optimizer.zero_grad()
        F.cross_entropy(module(rows), (rows + 1) % 11).backward()
        optimizer.step()
    for stage in STAGES:
        found = ranks(num_ranks)(train_tied, stage, cut)
        assert furthest(found[0][0], weights(module)) <= 1e-6, f"stage {stage}"
        assert all(same for _, same in found)
