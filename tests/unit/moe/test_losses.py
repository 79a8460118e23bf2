"""Auxiliary losses and the bias against formulas written with one-hot masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zeroexp.moe import GATES, MLP, MoE, auxiliary_loss, update_biases
from zeroexp.moe.bias import Bias
from zeroexp.moe.losses import load_balance, router_z, sequence_balance


def route(kind: str, k: int, logits: Tensor) -> Any:
    return GATES[kind](2, logits.shape[1], top_k=k).route(logits, None)


@pytest.mark.parametrize(("kind", "k"), [("top1", 1), ("top2", 2), ("topk", 3)])
def test_the_balance_loss_is_deepspeeds(kind: str, k: int) -> None:
    """deepspeed.md 2.13: top-1 E sum(me ce); top-2 E^2 mean(me ce) with first choices; top-k with
    all of them, over k."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(24, 6, dtype=torch.float64)
    gates = logits.softmax(1)
    me = gates.mean(0)
    if kind == "topk":
        mask = F.one_hot(gates.topk(k).indices, 6).sum(1)
        wanted = (me * mask.double().mean(0)).mean() * 6**2 / k
    else:
        ce = F.one_hot(gates.argmax(1), 6).double().mean(0)
        wanted = (me * ce).sum() * 6 if kind == "top1" else (me * ce).mean() * 6**2
    routing = route(kind, k, logits)
    torch.testing.assert_close(
        load_balance(routing.probs_SE, routing.fraction_E), wanted, rtol=0, atol=1e-12
    )


def test_hand_written_values() -> None:
    """Four tokens, two experts, p = 3/4 for the chosen one. Loads 3 and 1: f = (3/4, 1/4), P =
    ((3 * 3/4 + 1/4) / 4, ...) = (5/8, 3/8), loss = 2 * (15/32 + 3/32) = 9/8."""
    odds = math.log(3.0)
    logits = torch.tensor([[odds, 0], [odds, 0], [0, odds], [odds, 0]], dtype=torch.float64)
    routing = route("top1", 1, logits)
    assert float(load_balance(routing.probs_SE, routing.fraction_E)) == pytest.approx(
        9 / 8, abs=1e-12
    )
    assert float(router_z(logits)) == pytest.approx(math.log(4.0) ** 2, abs=1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_an_even_router_costs_one(kind: str) -> None:
    """Switch: the least value is 1, at a uniform distribution."""
    k = {"top1": 1}.get(kind, 2)
    logits = torch.eye(8, dtype=torch.float64) * 1e-9  # ties broken evenly, one expert a token
    logits += torch.roll(logits, 1, dims=1) / 2
    routing = route(kind, k, logits)
    loss = load_balance(routing.probs_SE, routing.fraction_E)
    assert float(loss) == pytest.approx(1.0, abs=1e-8)


def test_sequences_are_balanced_one_by_one() -> None:
    """DeepSeek-V3, eq. 17-20: two sequences that are each all of one expert are even together."""
    odds = math.log(3.0)
    logits = torch.tensor([[odds, 0.0]] * 3 + [[0.0, odds]] * 3, dtype=torch.float64)
    routing = route("topk", 1, logits)
    together = sequence_balance(routing.probs_SE, routing.chosen_SK, 1)
    apart = sequence_balance(routing.probs_SE, routing.chosen_SK, 2)
    assert float(together) == pytest.approx(1.0, abs=1e-12)
    assert float(apart) == pytest.approx(2 * 3 / 4, abs=1e-12)

    torch.manual_seed(0)
    logits = torch.randn(20, 5, dtype=torch.float64)
    routing = route("sigmoid", 2, logits)
    s = logits.sigmoid()
    total = 0.0
    for block in range(4):
        rows = s[5 * block : 5 * block + 5]
        for e in range(5):
            f = sum(e in row.topk(2).indices.tolist() for row in rows) * 5 / (2 * 5)
            total += f * float((rows / rows.sum(1, keepdim=True))[:, e].mean())
    found = sequence_balance(routing.probs_SE, routing.chosen_SK, 4)
    assert float(found) == pytest.approx(total / 4, abs=1e-12)


def test_the_layer_hands_out_the_weighted_sum_once() -> None:
    torch.manual_seed(0)
    layer = MoE(
        4, MLP(4), 3, 2, gate="topk", balance_loss=0.5, z_loss=0.25, sequence_loss=0.125
    ).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    wanted = torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        layer(x)
        routing = layer.gate(x.view(-1, 4))
        wanted = (
            wanted
            + 0.5 * load_balance(routing.probs_SE, routing.fraction_E)
            + 0.25 * router_z(routing.logits_SE)
            + 0.125 * sequence_balance(routing.probs_SE, routing.chosen_SK, 2)
        )
    loss = auxiliary_loss(layer)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(loss, layer.gate.weight)
    assert float(grad.abs().max()) > 0
    assert float(auxiliary_loss(layer)) == 0
    layer.eval()(x)
    assert float(auxiliary_loss(layer)) == 0, "nothing is asked for in eval"


def test_losses_of_no_token_are_zero() -> None:
    layer = MoE(4, MLP(4), 3, 2, gate="topk", z_loss=0.1, sequence_loss=0.1)
    layer(torch.zeros(0, 4))
    loss = auxiliary_loss(layer)
    loss.backward()
    assert loss.item() == 0
    assert layer.gate.weight.grad is not None and not layer.gate.weight.grad.any()


def test_the_bias_moves_against_the_load() -> None:
    """The published sign trap (papers.md 1.7): an overloaded expert's bias falls."""
    bias = Bias(3, 0.001)
    bias.update(torch.tensor([10, 1, 4]))
    torch.testing.assert_close(bias.value, torch.tensor([-0.001, 0.001, 0.001]))
    bias.update(torch.tensor([5, 5, 5]))
    torch.testing.assert_close(bias.value, torch.tensor([-0.001, 0.001, 0.001]))


def test_the_bias_moves_once_a_step_whatever_the_micro_batches() -> None:
    torch.manual_seed(0)
    layer = MoE(4, MLP(4), 4, 2, gate="sigmoid", bias_rate=0.01, balance_loss=0.0)
    assert layer.gate.bias is not None
    batches = torch.randn(3, 10, 4)
    loads = []
    for batch in batches:
        layer(batch)
        loads.append(layer.gate(batch).load_E)
        assert not layer.gate.bias.value.any()
    layer.eval()(batches[0])  # an evaluation between them counts for nothing
    update_biases(layer)
    load = torch.stack(loads).sum(0).double()
    wanted = 0.01 * torch.sign(load.mean() - load)
    torch.testing.assert_close(layer.gate.bias.value.double(), wanted, rtol=0, atol=1e-9)
    before = layer.gate.bias.value.clone()
    update_biases(layer)
    assert torch.equal(layer.gate.bias.value, before), "no load, no step"


@pytest.mark.parametrize(("kind", "k"), [("sigmoid", 2), ("topk", 2), ("top1", 1)])
def test_the_bias_evens_a_skewed_router(kind: str, k: int) -> None:
    """papers.md 1.7: MaxVio below 0.1 within 500 batches at u = 1e-3."""
    torch.manual_seed(0)
    skew = torch.linspace(0.6, -0.6, 8)
    gate = GATES[kind](8, 8, top_k=k, bias_rate=1e-3)
    assert gate.bias is not None

    def violation() -> float:
        load = gate.route(torch.randn(4096, 8) + skew, None).load_E.double()
        return float((load.max() - load.mean()) / load.mean())

    assert violation() > 0.5
    for _ in range(500):
        gate.bias.observe(gate.route(torch.randn(512, 8) + skew, None).load_E)
        update_biases(gate)
    assert violation() < 0.1


def test_the_bias_stays_fp32() -> None:
    """1e-3 added to 0.5 is nothing in bf16 (its spacing there is 0.004)."""
    bias = Bias(2, 1e-3)
    bias.value.fill_(0.5001)
    bias.to(torch.bfloat16)
    assert bias.value.dtype == torch.float32 and float(bias.value[0]) == pytest.approx(0.5001)
    bias.to("meta").to_empty(device="cpu").reset_parameters()
    assert bias.value.tolist() == [0, 0]
    assert list(bias.state_dict()) == ["value"]
