"""Noise: its distribution, and that a resume and a recomputation see it again."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.errors import ModelError
from zeroexp.moe import GATES, MLP, MoE, auxiliary_loss, read_statistics
from zeroexp.moe.bias import Bias

NOISY: list[dict[str, Any]] = [
    {"top_k": 1, "gate_options": {"gumbel": True}, "jitter": 0.05},
    {"top_k": 1, "priority": "random", "capacity_factor": 0.5, "min_capacity": 1},
    {"top_k": 2, "gate_options": {"second": "gumbel"}},
    {"top_k": 2, "gate_options": {"second": "skip"}, "capacity_factor": 1.0},
    {"gate": "sigmoid", "top_k": 2, "jitter": 0.2, "bias_rate": 0.01},
]


def model_of(keys: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(MoE(6, MLP(8), 4, **keys) for _ in range(2)))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(12, 6)
        optimizer.zero_grad()
        (model(x).square().sum() + auxiliary_loss(model)).backward()
        optimizer.step()


@pytest.mark.parametrize("keys", NOISY)
def test_a_resumed_run_draws_what_the_first_would_have_drawn(keys: dict[str, Any]) -> None:
    model = model_of(keys)
    train(model, 2)
    saved, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    train(model, 3)
    again = model_of(keys)
    again.load_state_dict(saved)
    torch.set_rng_state(state)
    train(again, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keys", NOISY)
def test_a_recomputed_block_routes_alike_and_counts_once(keys: dict[str, Any]) -> None:
    """The micro-batches are recomputed in another order than they were computed in."""
    found: list[tuple[list[Tensor], Any]] = []
    for recompute in (False, True):
        model = model_of(keys)
        xs = torch.randn(3, 12, 6)
        outs = []
        for x in xs:
            if recompute:
                outs.append(checkpoint(model, x.requires_grad_(), use_reentrant=False))
            else:
                outs.append(model(x))
        extra = auxiliary_loss(model)
        for out in outs:
            out.square().sum().backward(retain_graph=True)
        extra.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loads = [m.load for m in model.modules() if isinstance(m, Bias)]
        found.append((grads, (read_statistics(model), str(loads))))
    (plain, counted), (recomputed, recounted) = found
    assert len(plain) == len(recomputed) == len(list(model.parameters()))
    for a, b in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert counted == recounted


def test_a_reentrant_recomputation_would_lose_the_losses() -> None:
    layer = MoE(6, MLP(8), 4)
    out = checkpoint(layer, torch.randn(5, 6, requires_grad=True), use_reentrant=True)
    with pytest.raises(ModelError, match="Use use_reentrant=False"):
        out.sum().backward()


def test_a_generator_of_ones_own_is_used_instead() -> None:
    mine = torch.Generator().manual_seed(5)
    layer = MoE(6, MLP(8), 4, jitter=0.3, generator=mine)
    x = torch.randn(12, 6)
    saved, default = mine.get_state(), torch.get_rng_state()
    first = layer.gate(x).logits_SE
    assert torch.equal(torch.get_rng_state(), default)
    assert not torch.equal(layer.gate(x).logits_SE, first)
    mine.set_state(saved)
    assert torch.equal(layer.gate(x).logits_SE, first)


def test_the_number_of_tokens_does_not_move_the_default_generator() -> None:
    """Ranks with batches of different sizes stay together in what they draw next."""
    layer = MoE(6, MLP(8), 4, jitter=0.3)
    states = []
    for tokens in (1, 50):
        torch.manual_seed(0)
        layer(torch.zeros(tokens, 6))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_jitter_is_uniform_around_one() -> None:
    """U(1 - 0.25, 1 + 0.25): variance 0.25^2 / 3."""
    gate = GATES["top1"](1, 1, top_k=1, jitter=0.25)
    nn.init.ones_(gate.weight)
    noise = gate(torch.ones(40000, 1)).logits_SE.detach().flatten()
    assert float(noise.min()) >= 0.75 and float(noise.max()) <= 1.25
    assert float(noise.min()) < 0.751 and float(noise.max()) > 1.249
    assert abs(float(noise.mean()) - 1) < 0.003
    assert abs(float(noise.var()) - 0.25**2 / 3) < 0.0006


N = 40000
LOGITS = torch.tensor([1.0, 0.0, 0.5, -1.0])


def test_gumbel_draws_an_expert_with_its_probability() -> None:
    gate = GATES["top1"](1, 4, top_k=1, gumbel=True)
    routing = gate.route(LOGITS.repeat(N, 1), torch.Generator().manual_seed(0))
    wanted = LOGITS.softmax(0)
    assert float((routing.load_E / N - wanted).abs().max()) < 0.01  # 4 sigma of N draws
    weights = routing.weight_A.split(routing.load_E.tolist())
    for e in range(4):  # the weight is the probability, not the noisy score
        torch.testing.assert_close(weights[e], wanted[e].expand_as(weights[e]))


def test_a_second_expert_is_drawn_from_the_rest_with_its_probability() -> None:
    gate = GATES["top2"](1, 4, top_k=2, second="gumbel")
    routing = gate.route(LOGITS.repeat(N, 1), torch.Generator().manual_seed(0))
    rest = LOGITS[1:].softmax(0)
    assert int(routing.load_E[0]) == N
    assert float((routing.load_E[1:] / N - rest).abs().max()) < 0.01


@pytest.mark.parametrize("gap", [0.5, 3.0])
def test_a_weak_second_expert_is_skipped_at_random(gap: float) -> None:
    """GShard, algorithm 1: sent with probability min(1, 2 g2), g2 = 1 / (1 + e^gap); the first
    keeps its share."""
    gate = GATES["top2"](1, 3, top_k=2, second="skip")
    logits = torch.tensor([gap, 0.0, -30.0]).repeat(N, 1)
    routing = gate.route(logits, torch.Generator().manual_seed(0))
    share = 1 / (1 + math.exp(gap))
    assert int(routing.load_E[0]) == N and int(routing.load_E[2]) == 0
    assert abs(int(routing.load_E[1]) / N - min(1.0, 2 * share)) < 0.01
    torch.testing.assert_close(routing.weight_A[:N], torch.full((N,), 1 - share))
    assert routing.weight_A.numel() == int(routing.counts_E.sum())
