"""Norms, clipping and non-finite values, at every stage.

The ids name published cases; values come from their text or from plain torch in one process.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from small import (
    STAGES,
    Scalar,
    caught,
    micro_batches,
    mlp,
    rank,
    regression,
    sgd_engine,
    step,
)
from torch import Tensor, nn

RANKS = (1, 2)


def clipped(stage: int) -> tuple[list[float], float, float]:
    engine = sgd_engine(Scalar(3.0, 4.0), stage, lr=1.0, clip=1.0)
    step(engine, torch.tensor([3.0, 4.0]))
    whole = engine.state_dict()
    w = whole["w"].tolist() if whole else []
    return w, float(engine.grad_norm), float(engine.grad_norm_clipped)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_ls05_clipping_is_applied(ranks, stage, num_ranks):
    """LS-05: w = [3,4], gradient [3,4], clip 1, lr 1 gives [2.4, 3.2]; norms 5 and 1."""
    found = ranks(num_ranks)(clipped, stage)
    assert found[0][0] == pytest.approx([2.4, 3.2], abs=1e-6)
    for _, before, after in found:
        assert before == pytest.approx(5.0, rel=1e-6) and after == pytest.approx(1.0, rel=1e-5)


def nonfinite(stage: int, policy: str, compute: str, bad_rank: int) -> dict[str, Any]:
    engine = sgd_engine(Scalar(1.0, 2.0), stage, compute=compute, precision_nonfinite=policy)
    error: tuple[str, str] = ("", "")
    for _ in range(3):
        engine.backward(engine(float("nan") if rank() == bad_rank else 1.0))
        error = caught(engine.step)
    whole = {} if error[0] else engine.state_dict()
    finite = all(bool(t.isfinite().all()) for t in whole.values())
    return {"error": error, "skipped": engine.skipped_steps, "finite": finite}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_ds73_nonfinite_gradients_follow_the_policy(ranks, stage, compute):
    """deepspeed 3.D 73, 3.B 31: one bad rank, one decision on all: skip, apply, or a named stop."""
    for found in ranks(2)(nonfinite, stage, "skip", compute, 1):
        assert found == {"error": ("", ""), "skipped": 3, "finite": True}
    found = ranks(2)(nonfinite, stage, "apply", compute, 1)
    assert not found[0]["finite"] and all(each["skipped"] == 0 for each in found)
    for found in ranks(2)(nonfinite, stage, "stop", compute, 1):
        kind, message = found["error"]
        assert kind == "NonFiniteError" and "w" in message
        assert re.search(r"rank\D{0,8}1\b", message), message


def clip_by_norm(stage: int, max_norm: float) -> tuple[float, float, list[Tensor]]:
    module = mlp(6, 11, 3)
    engine = sgd_engine(module, stage)
    ((x, y),) = micro_batches(regression(1, 8, 6, 3)[0], 1)
    engine.backward((engine(x) - y).square().mean() * 50)
    norm = engine.clip_norm(max_norm)
    return norm, float(engine.grad_norm), [engine.full_grad(p) for p in module.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_ds32_clipping_equals_torch(ranks, stage, num_ranks):
    """deepspeed 3.B 32, 3.C 55: norm and clipped gradients of clip_grad_norm_, on all ranks."""
    module = mlp(6, 11, 3)
    x, y = regression(1, 8, 6, 3)[0]
    for r in range(num_ranks):
        a, b = x.chunk(num_ranks)[r], y.chunk(num_ranks)[r]
        ((module(a) - b).square().mean() * 50 / num_ranks).backward()
    total = float(nn.utils.clip_grad_norm_(module.parameters(), 0.7))
    assert total > 0.7
    found = ranks(num_ranks)(clip_by_norm, stage, 0.7)
    assert len({(norm, logged) for norm, logged, _ in found}) == 1
    for norm, _, grads in found:
        assert norm == pytest.approx(total, rel=1e-5)
        for got, parameter in zip(grads, module.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad, atol=1e-6)


def clip_by_value(stage: int) -> list[float]:
    engine = sgd_engine(Scalar(0.0, 0.0, 0.0), stage, lr=1.0)
    engine.backward(engine(torch.tensor([3.0, -4.0, 0.25])))
    engine.clip_value(0.5)
    engine.step()
    whole = engine.state_dict()
    return whole["w"].tolist() if whole else []


def test_pl04_clipping_by_value(ranks):
    """PL-04: gradient [3,-4] clipped by value 0.5 moves by 0.5 each."""
    for stage in STAGES:
        assert ranks(2)(clip_by_value, stage)[0] == [-0.5, 0.5, -0.25]
