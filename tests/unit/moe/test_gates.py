"""Every gate against a loop over tokens and experts, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_moe import gradients, plain_forward  # type: ignore[import-not-found]
from torch import nn

from zeroexp.moe import MLP, Gate, MoE

TOKENS, CHANNELS, EXPERTS = 13, 6, 5

GATES: list[tuple[str, int, dict[str, Any]]] = [
    ("top1", 1, {}),
    ("top2", 2, {"priority": "choice"}),
    ("topk", 1, {}),
    ("topk", 3, {}),
    ("topk", 3, {"priority": "probs"}),
    ("sigmoid", 1, {}),
    ("sigmoid", 2, {"scale": 2.5}),
    ("expert_choice", 2, {}),
]


def factory() -> nn.Module:
    return nn.Sequential(nn.Linear(CHANNELS, 7), nn.Tanh(), nn.Linear(7, CHANNELS))


EXPERT_KINDS: dict[str, Any] = {
    "gelu": MLP(7),
    "swiglu": MLP(7, "swiglu", bias=False),
    "modules": factory,
}


def layer_of(kind: str, k: int, keys: dict[str, Any], expert: Any, **rest: Any) -> MoE:
    torch.manual_seed(1)
    options = {"scale": keys["scale"]} if "scale" in keys else {}
    priority = {"priority": keys["priority"]} if "priority" in keys else {}
    layer = MoE(
        CHANNELS,
        expert,
        EXPERTS,
        k,
        gate=kind,
        gate_options=options,
        balance_loss=0.0,
        **priority,
        **rest,
    ).double()
    with torch.no_grad():
        layer.gate.weight.mul_(3)  # uneven enough that experts overflow
    return layer


@pytest.mark.parametrize("expert", EXPERT_KINDS)
@pytest.mark.parametrize("places", [None, 2])
@pytest.mark.parametrize(("kind", "k", "keys"), GATES)
def test_outputs_and_gradients_equal_the_plain_loop(
    kind: str, k: int, keys: dict[str, Any], places: int | None, expert: str
) -> None:
    # The factor of a single place: ceil(13 / 5 * f * k) = 2.
    rest = {} if places is None else {"capacity_factor": 0.7 / k, "min_capacity": 1}
    layer = layer_of(kind, k, keys, EXPERT_KINDS[expert], **rest)
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(TOKENS, CHANNELS, dtype=torch.float64)
    found = layer(x)
    wanted = plain_forward(layer, x, kind, places=places, **keys)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    a = gradients(layer, x, (found * direction).sum())
    b = gradients(layer, x, (wanted * direction).sum())
    for name, grad in b.items():
        torch.testing.assert_close(a[name], grad, rtol=0, atol=1e-12, msg=name)
    assert a["gate.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["top1", "topk", "sigmoid"])
def test_a_bias_selects_and_does_not_weigh(kind: str) -> None:
    k = 1 if kind == "top1" else 2
    layer = layer_of(kind, k, {}, factory, bias_rate=0.001)
    bias = torch.tensor([0.5, -0.5, 0.25, 0.0, 0.125])
    assert layer.gate.bias is not None
    layer.gate.bias.value.copy_(bias)
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64)
    wanted = plain_forward(layer, x, kind, bias=bias)
    assert not torch.allclose(wanted, plain_forward(layer, x, kind))
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["top1", "topk", "sigmoid"])
def test_the_gate_of_a_single_choice_gets_its_gradient(kind: str) -> None:
    """MO-05: a weight normalised over one choice is 1 and tells the gate nothing."""
    torch.manual_seed(0)
    layer = MoE(3, lambda: nn.Linear(3, 3), 2, 1, gate=kind, balance_loss=0.0).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    weight = layer.gate.weight
    layer(x).square().sum().backward()
    assert weight.grad is not None
    step = 1e-6
    for e in range(2):
        for c in range(3):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    weight[e, c] += sign * step
                    values.append(float(layer(x).square().sum()))
                    weight[e, c] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert abs(slope - float(weight.grad[e, c])) <= 1e-4
    assert float(weight.grad.abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_scores_are_fp32_whatever_the_model_is(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    layer = MoE(16, MLP(8), 4, 2)
    x = torch.randn(5, 16)
    if not autocast:
        layer, x = layer.to(dtype), x.to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        routing = layer.gate(x)
        y = layer(x)
    exact = x.double() @ layer.gate.weight.double().t()
    assert routing.logits_SE.dtype == torch.float32
    torch.testing.assert_close(routing.logits_SE.double(), exact, rtol=0, atol=1e-6)
    assert y.dtype == dtype and bool(y.isfinite().all())


@pytest.mark.parametrize(("kind", "k", "keys"), GATES)
def test_eval_decides_alike_every_time(kind: str, k: int, keys: dict[str, Any]) -> None:
    """DeepSpeed's random token priority and second-expert sampling also act in eval; here nothing
    is drawn there."""
    options = {"top1": {"gumbel": True}, "top2": {"second": "gumbel"}}.get(kind, {})
    priority = {} if kind == "expert_choice" else {"priority": "random"}
    layer = MoE(
        CHANNELS,
        MLP(4),
        EXPERTS,
        k,
        gate=kind,
        gate_options=options,
        jitter=0.1,
        capacity_factor=0.5,
        min_capacity=1,
        **priority,
    )
    assert layer.draws_random
    x = torch.randn(40, CHANNELS)
    state = torch.get_rng_state()
    noisy = [layer(x) for _ in range(3)]
    assert not torch.equal(noisy[0], noisy[1]) and not torch.equal(torch.get_rng_state(), state)
    layer.eval()
    state = torch.get_rng_state()
    first = layer(x)
    assert torch.equal(layer(x), first) and torch.equal(torch.get_rng_state(), state)


CAUSAL: list[tuple[str, int, dict[str, Any], bool]] = [
    ("top1", 1, {}, True),
    ("top1", 1, {"capacity_factor": 0.5}, True),
    ("top2", 2, {}, True),
    ("top2", 2, {"capacity_factor": 0.5, "priority": "position"}, True),
    ("top2", 2, {"capacity_factor": 0.5}, False),
    ("topk", 3, {"capacity_factor": 0.5}, True),
    ("topk", 3, {"capacity_factor": 0.5, "priority": "probs"}, False),
    ("sigmoid", 2, {"bias_rate": 0.001}, True),
    ("expert_choice", 2, {}, False),
]


@pytest.mark.parametrize(("kind", "k", "keys", "causal"), CAUSAL)
def test_a_token_changes_no_earlier_output_where_the_gate_is_causal(
    kind: str, k: int, keys: dict[str, Any], causal: bool
) -> None:
    """papers.md 1.7. Expert choice must fail this, and so must drops that prefer later tokens."""
    torch.manual_seed(3)
    layer = (
        MoE(8, MLP(4), 4, k, gate=kind, min_capacity=1, balance_loss=0.0, **keys).double().eval()
    )
    with torch.no_grad():
        layer.gate.weight.mul_(4)
    x = torch.randn(24, 8, dtype=torch.float64)
    before = layer(x)
    changed = 0
    for j in range(0, 24, 3):
        for seed in range(4):
            torch.manual_seed(seed)
            other = x.clone()
            other[j] = 2 * torch.randn(8, dtype=torch.float64)
            changed += not torch.allclose(layer(other)[:j], before[:j], rtol=0, atol=1e-12)
    assert (changed == 0) == causal
    assert layer.gate.causal == causal


def test_a_gate_of_ones_own_is_taken_as_it_is() -> None:
    class Fixed(Gate):
        def route(self, logits_SE: Any, generator: Any) -> Any:
            raise RuntimeError("asked")

    layer = MoE(4, MLP(4), 3, gate=Fixed(4, 3, top_k=1))
    with pytest.raises(RuntimeError, match="asked"):
        layer(torch.zeros(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "k", "keys"), GATES)
@pytest.mark.parametrize("expert", EXPERT_KINDS)
def test_a_device_computes_what_the_host_computes(
    kind: str, k: int, keys: dict[str, Any], expert: str
) -> None:
    rest = {"capacity_factor": 0.7 / k, "min_capacity": 1}
    layer = layer_of(kind, k, keys, EXPERT_KINDS[expert], **rest)
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    wanted = gradients(layer, x, y.square().sum())
    there, x_there = copy.deepcopy(layer).cuda(), x.detach().cuda().requires_grad_()
    y_there = there(x_there)
    torch.testing.assert_close(y_there.cpu(), y, rtol=0, atol=1e-9)
    for name, grad in gradients(there, x_there, y_there.square().sum()).items():
        torch.testing.assert_close(grad.cpu(), wanted[name], rtol=0, atol=1e-9, msg=name)
