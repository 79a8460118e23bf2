"""What the engine does for MoE layers of a model of one's own."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from zeroexp.engine import Engine
from zeroexp.moe import MLP, MoE, auxiliary_loss

CONFIG = {"precision.compute": "fp32", "trainer.gradient_clip_val": None}


def layer(**options: float) -> MoE:
    torch.manual_seed(0)
    return MoE(8, MLP(12), 4, 2, gate="topk", **options)  # type: ignore[arg-type]


def test_layers_learn_their_paths_and_biases_move_once_a_step() -> None:
    """b_e += u * sign(mean load - load_e) (arXiv:2408.15664), over all micro-batches."""
    model = nn.Sequential(nn.Linear(8, 8), layer(bias_rate=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(model, optimizer, {**CONFIG, "trainer.accumulate_grad_batches": 2})
    sparse = model[1]
    assert isinstance(sparse, MoE)
    assert sparse.where == "MoE layer 1" and sparse.gate.bias is not None
    load = torch.zeros(4)
    for micro in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(micro))
        with torch.no_grad():
            logits = model[0](x) @ sparse.gate.weight.t()
        load += torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
        assert not sparse.gate.bias.value.any()
        engine.backward(engine(x).square().mean() + auxiliary_loss(model))
        engine.step()
    assert torch.equal(sparse.gate.bias.value, 0.5 * torch.sign(load.mean() - load))
    engine.close()


def test_experts_that_came_after_the_optimizer_are_reported(  # MO-07
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.append(layer())
    with caplog.at_level(logging.WARNING, "zeroexp"):
        Engine(model, optimizer, CONFIG).close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("no optimizer holds 1.experts.up (4 parameters of experts)")
    caplog.clear()
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "zeroexp"):
        Engine(model, optimizer, CONFIG).close()
    assert not caplog.records
