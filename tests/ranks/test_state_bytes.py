"""Resident bytes of state per rank: the formula to the byte, found by walking what is alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from census import bytes_since, live_storages
from formula import sizes, state_bytes
from small import STAGES, micro_batches, settings, tiny_gpt, token_batches
from torch import nn

from zeroexp.engine import Engine

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}, 8),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 4),
    "sgd": (torch.optim.SGD, {}, 0),
}


def built(name: str) -> nn.Module:
    if name == "gpt":
        return tiny_gpt()
    torch.manual_seed(0)
    if name == "odd":  # nothing divides anything
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3), nn.Linear(3, 1))
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))


def forward(engine: Engine, name: str) -> torch.Tensor:
    if name == "gpt":
        return engine(*next(iter(micro_batches(token_batches(1, 4)[0], 1))))
    width = 7 if name == "odd" else 32
    return engine(torch.ones(2, width)).square().mean()


def resident(name: str, kind: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Count in the middle of the second step: gradients are reduced, optimizer state exists."""
    before = live_storages()
    model = built(name)
    make, options, _ = OPTIMIZERS[kind]
    engine = Engine(model, make(model.parameters(), lr=0.1, **options), settings(**keys))
    found: dict[str, Any] = {}
    for step in range(2):
        loss = forward(engine, name)
        engine.backward(loss)
        del loss
        if step == 1:
            found["counted"] = bytes_since(before)
            found["state"] = engine.ledger.state_bytes()
            found["padding"] = engine.ledger.padding_bytes()
            found["transient"] = {k: engine.ledger.live_bytes(k) for k in ("whole", "workspace")}
        engine.step()
    found["between"] = bytes_since(before) - sum(
        engine.ledger.live_bytes(k) for k in ("whole", "workspace")
    )
    engine.close()
    return found


def check(found: dict[str, Any], wanted: Any, where: str) -> None:
    kinds = {kind: tiers.get("device", 0) for kind, tiers in found["state"].items()}
    assert kinds == {"params": wanted.params, "grads": wanted.grads, "optim": wanted.optim}, where
    assert all(n == 0 for t in found["state"].values() for k, n in t.items() if k != "device")
    assert found["counted"] - sum(found["transient"].values()) == wanted.total, where
    # Between steps nothing but the state (gradient buffers may stay for the next step).
    assert found["between"] in (wanted.total, wanted.total - wanted.grads), where


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gpt", "odd", "even"])
def test_bytes_of_each_stage(ranks, name, stage, num_ranks):
    """fp32 AdamW: 4 bytes of parameters and gradients, 8 of moments, per element."""
    wanted = state_bytes(built(name), stage, num_ranks)
    results = ranks(num_ranks)(resident, name, "adamw", {"stage": stage})
    for rank, found in enumerate(results):
        check(found, wanted, f"rank {rank}")
    padding = sum(found["padding"] for found in results)
    assert num_ranks * wanted.total - padding == round(num_ranks * wanted.ideal)
    if name == "even":
        assert padding == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["momentum", "sgd"])
def test_bytes_of_other_optimizers(ranks, kind, stage):
    size = OPTIMIZERS[kind][2]
    wanted = state_bytes(built("odd"), stage, 2, optim_size=size)
    for found in ranks(2)(resident, "odd", kind, {"stage": stage}):
        check(found, wanted, kind)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("keys", "param", "grad", "optim"),
    [
        ({"compute": "bf16"}, 2, 4, 12),
        ({"compute": "bf16", "precision_accumulate": "bf16"}, 2, 2, 12),
        ({"compute": "bf16", "precision_master": "none"}, 2, 4, 4),
        ({"compute": "fp64"}, 8, 8, 16),
    ],
)
def test_bytes_of_other_precisions(ranks, keys, param, grad, optim, stage):
    """bf16 with an fp32 master is ZeRO's K = 12; bf16 alone keeps its moments in bf16."""
    wanted = state_bytes(built("odd"), stage, 2, param_size=param, grad_size=grad, optim_size=optim)
    for found in ranks(2)(resident, "odd", "adamw", {"stage": stage, **keys}):
        check(found, wanted, str(keys))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_transient_bytes_are_bounded(ranks, num_ranks):
    """Stage 3 holds the current unit and ``prefetch`` more whole; two units are in reduction."""
    for prefetch in (0, 1, 2):
        peaks = ranks(num_ranks)(peak, prefetch)
        one = sizes(six_layers(), num_ranks, trainable=True, only="0").padded * 4
        for whole, workspace in peaks:
            assert one * (1 + prefetch) >= whole >= one
            # Each unit in reduction has its gradients and what arrives from the peers; in a third
            # one gradients arrive from autograd.
            assert 0 < workspace <= one * (2 + 1) + 2 * one * (num_ranks - 1) // num_ranks


def six_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def peak(prefetch: int) -> tuple[int, int]:
    model = six_layers()
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), settings(3, zero_prefetch=prefetch)
    )
    for _ in range(3):
        engine.ledger.reset_peaks()
        engine.backward(engine(torch.ones(2, 32)).sum())
        engine.step()
    found = engine.ledger.peak_bytes("whole"), engine.ledger.peak_bytes("workspace")
    engine.close()
    return found


def between_micro_batches(stage: int, reduce: str) -> tuple[int, int]:
    """Bytes alive between two micro-batches of the second step; what the ledger holds in all."""
    before = live_storages()
    model = six_layers()
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters()),
        settings(stage, accumulate=2, zero_reduce=reduce),
    )
    for step in range(2):
        for last in (False, True):
            loss = engine(torch.ones(2, 32)).sum()
            engine.backward(loss, last=last)
            del loss
            if step == 1 and not last:
                counted = bytes_since(before)
                state = engine.ledger.state_bytes()
                held = sum(sum(tiers.values()) for tiers in state.values())
                held += sum(engine.ledger.live_bytes(k) for k in ("whole", "workspace"))
        engine.step()
    engine.close()
    return counted, held


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_between_micro_batches(ranks, stage, reduce):
    """Nothing is alive that the ledger does not know; each keeps sharded gradients sharded."""
    model = six_layers()
    wanted = state_bytes(model, stage, 2, summed_apart=reduce == "each")
    whole = sizes(model, 2, trainable=True).padded * 4
    one = whole // 6
    for counted, held in ranks(2)(between_micro_batches, stage, reduce):
        assert counted == held
        if stage < 2 or reduce == "each":
            assert wanted.total <= counted <= wanted.total + 4 * one
        else:  # local gradients of the whole model wait for the last micro-batch
            assert wanted.total + whole <= counted <= wanted.total + whole + 4 * one
