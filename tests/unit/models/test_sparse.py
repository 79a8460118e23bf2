"""The GPT with experts: parameters, FLOPs, start weights, recomputation, losses, resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroexp.config import Config
from zeroexp.models.build import build
from zeroexp.models.specs import flops_per_token, num_active_params, num_params, param_specs
from zeroexp.moe import auxiliary_loss, count_parameters, moe_layers
from zeroexp.optim.build import build as build_optimizer
from zeroexp.strategies.module import LanguageModule

TINY = {"model.dim": 32, "model.layers": 3, "model.heads": 2, "model.vocab_size": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "top2": {"moe.kind": "top2", "moe.experts": 4},
    "every": {"moe.kind": "top1", "moe.every": 2},
    "rich": {
        "moe.kind": "sigmoid",
        "moe.top_k": 3,
        "moe.shared": 2,
        "moe.residual": True,
        "moe.bias_rate": 0.1,
        "model.activation": "swiglu",
        "model.bias": True,
    },
    "expert_choice": {"moe.kind": "expert_choice", "moe.every": 3},
}


def config(variant: str, **more: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in more.items()}
    return Config.from_mapping({**TINY, **VARIANTS[variant], **keys})


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_specs_and_counts_are_those_of_the_module(variant: str) -> None:
    c = config(variant)
    module = build(c.model, c.moe, seed=0)
    assert [(s.name, s.shape) for s in param_specs(c.model, c.moe)] == [
        (name, tuple(p.shape)) for name, p in module.named_parameters()
    ]
    counted = num_active_params(c.model, c.moe), num_params(c.model, c.moe)
    assert counted == count_parameters(module)
    assert len(moe_layers(module)) == 3 // c.moe.every


def test_mixtral_has_its_published_sizes() -> None:
    """arXiv:2401.04088: 46.7 billion parameters, 12.9 billion for a token; the published weights
    have 46,702,792,704."""
    mixtral = Config.from_mapping(
        {
            "model": {
                "vocab_size": 32000,
                "dim": 4096,
                "layers": 32,
                "heads": 32,
                "kv_heads": 8,
                "hidden": 14336,
                "activation": "swiglu",
                "tied": False,
            },
            "moe": {"kind": "top2", "experts": 8},
        }
    )
    assert num_params(mixtral.model, mixtral.moe) == 46_702_792_704
    assert num_active_params(mixtral.model, mixtral.moe) == 12_879_925_248


@pytest.mark.parametrize("variant", ["top2", "every", "rich"])
def test_flops_equal_what_torch_counts(variant: str) -> None:
    """Every token is served, so each meets as many experts as it takes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    c = config(variant)
    module = build(c.model, c.moe, seed=0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (module(tokens(), tokens()) + auxiliary_loss(module)).backward()
    assert counter.get_total_flops() == flops_per_token(c.model, 16, c.moe) * 2 * 16


def test_experts_start_as_the_dense_blocks_do() -> None:
    """N(0, 0.02^2), and 0.02 / sqrt(2 layers) into the residual stream; every expert its own."""
    c = config("rich")
    experts = build(c.model, c.moe, seed=0).get_submodule("blocks.0.mlp.experts")
    weights = {name: p.detach() for name, p in experts.named_parameters()}
    for name, std in {"up": 0.02, "gate": 0.02, "down": 0.02 / math.sqrt(6)}.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03)
        assert not weights[f"{name}_bias"].any()
        assert not torch.equal(weights[name][0], weights[name][1])


@pytest.mark.parametrize("keys", [{"moe__jitter": 0.5}, {"moe__capacity_factor": 0.5}])
def test_recomputed_blocks_take_the_same_experts(keys: dict[str, Any]) -> None:
    c = config("top2", **keys)
    gradients = []
    for recompute in (False, True):
        module = build(c.model, c.moe, seed=0, recompute=recompute)
        torch.manual_seed(1)
        (module(tokens(), tokens()) + auxiliary_loss(module)).backward()
        gradients.append([p.grad for p in module.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_stacked_biases_are_not_decayed() -> None:
    c = config("rich")
    module = build(c.model, c.moe, seed=0)
    decayed, spared = build_optimizer(c.optim, module.named_parameters()).param_groups
    names = {p: name for name, p in module.named_parameters()}
    assert [n for n in map(names.get, decayed["params"]) if "bias" in str(n)] == []
    assert "blocks.0.mlp.experts.up_bias" in map(names.get, spared["params"])


def test_a_step_returns_what_gates_add_apart() -> None:
    module = LanguageModule(config("top2", moe__z_loss=0.1))
    module.configure_model()
    seen: list[tuple[Tensor, Tensor]] = []  # input and weight of each gate
    for layer in moe_layers(module).values():
        layer.gate.register_forward_hook(
            lambda gate, x, _: seen.append((x[0].detach(), gate.weight.detach()))
        )
    batch: Any = {"tokens": tokens(), "targets": tokens().roll(-1, 1)}
    out = module.training_step(batch, 0)
    assert isinstance(out, dict)
    expected = 0.0
    for x_SC, weight_EC in seen:
        logits_SE = (x_SC @ weight_EC.t()).double()
        first_E = torch.bincount(logits_SE.argmax(1), minlength=4) / len(x_SC)
        balance = 4 * (first_E * logits_SE.softmax(1).mean(0)).sum()
        expected += float(0.01 * balance + 0.1 * logits_SE.logsumexp(1).square().mean())
    assert len(seen) == 3
    assert out["auxiliary_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert not out["task_loss"].requires_grad
    picked = module(batch["tokens"]).log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1))
    assert out["task_loss"].item() == pytest.approx(-picked.mean().item(), rel=1e-5)
    total = out["task_loss"] + out["auxiliary_loss"]
    assert out["loss"].item() == pytest.approx(total.item(), rel=1e-6)


def test_a_checkpoint_holds_the_random_state() -> None:
    module = LanguageModule(config("top2"))
    saved: dict[str, Any] = {}
    module.on_save_checkpoint(saved)
    drawn = torch.rand(3)
    other = LanguageModule(config("top2"))
    other.on_load_checkpoint(saved)
    torch.rand(7)
    other.on_train_start()
    assert torch.equal(torch.rand(3), drawn)
