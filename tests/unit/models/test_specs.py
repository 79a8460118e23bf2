"""Parameters and FLOPs counted without torch, against the modules and against published tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zeroexp.config.sections import ModelConfig
from zeroexp.errors import ModelError
from zeroexp.models.build import build
from zeroexp.models.specs import (
    FLOPS_FORMULA,
    flops_per_token,
    is_built_in,
    num_params,
    param_specs,
)

VARIANTS = {
    "default": ModelConfig(),
    "untied": ModelConfig(tied=False),
    "gpt2": ModelConfig(norm="layernorm", positions="learned", bias=True),
    "layernorm": ModelConfig(norm="layernorm"),
    "grouped": ModelConfig(kv_heads=1, activation="swiglu", hidden=344),
    "swiglu_bias": ModelConfig(activation="swiglu", bias=True, mlp_ratio=2.5),
    "mlp": ModelConfig(kind="mlp"),
    "mlp_bias": ModelConfig(kind="mlp", bias=True, hidden=96, layers=3),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_specs_are_those_of_the_module(variant: str) -> None:
    model = VARIANTS[variant]
    with torch.device("meta"):
        module = build(model, seed=0)
    specs = param_specs(model)
    assert [(s.name, s.shape, s.dtype, s.trainable) for s in specs] == [
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in module.named_parameters()
    ]
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    assert [[s.name, *s.aliases] for s in specs] == list(names.values())


def test_gpt2_has_its_published_size() -> None:
    """124,439,808 parameters, less 12 x 768 key biases, which this GPT does not have."""
    gpt2 = ModelConfig(
        vocab_size=50257,
        dim=768,
        layers=12,
        heads=12,
        norm="layernorm",
        positions="learned",
        max_seq_len=1024,
        bias=True,
    )
    assert num_params(gpt2) == 124_439_808 - 12 * 768


def test_llama3_8b_has_its_published_size() -> None:
    llama = ModelConfig(
        vocab_size=128256,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14336,
        activation="swiglu",
        tied=False,
    )
    assert num_params(llama) == 8_030_261_248


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "gpus", "batch", "seconds", "mfu"),
    [
        (6144, 48, 64, 8, 4, 1.10, 41.5),
        (12288, 96, 96, 64, 64, 13.75, 51.4),
        (20480, 105, 128, 280, 280, 37.83, 56.0),
        (25600, 128, 160, 512, 512, 71.49, 56.3),
    ],
)
def test_flops_reproduce_the_mfu_of_korthikanti(
    dim: int, layers: int, heads: int, gpus: int, batch: int, seconds: float, mfu: float
) -> None:
    """arXiv:2205.05198, table 5: sequences of 2048, vocabulary 51200, 312 TFLOP/s per GPU."""
    model = ModelConfig(
        vocab_size=51200, dim=dim, layers=layers, heads=heads, norm="layernorm", bias=True
    )
    rate = flops_per_token(model, 2048) * 2048 * batch / seconds / gpus
    assert 100 * rate / 312e12 == pytest.approx(mfu, abs=0.25)
    equation = 72 * layers * dim**2 * (1 + 2048 / (6 * dim) + 51200 / (12 * dim * layers))
    assert flops_per_token(model, 2048) == pytest.approx(equation, rel=1e-12)


def test_attention_term_is_that_of_palm() -> None:
    """PaLM 540B, appendix B: 12 LHQT with L=118, H=48, Q=256, T=2048. Here dim = H x Q."""
    model = ModelConfig(vocab_size=2, dim=48 * 256, layers=118, heads=48)
    assert flops_per_token(model, 2048) - flops_per_token(model, 1024) == 12 * 118 * 48 * 256 * 1024


def test_one_product_counts_two_operations_and_three_passes() -> None:
    """A 100 x 100 product is 20,000 FLOPs forward; backward is two products of the same size."""
    one = ModelConfig(kind="mlp", vocab_size=2, dim=100, hidden=100, layers=1)
    two = ModelConfig(kind="mlp", vocab_size=2, dim=100, hidden=100, layers=2)
    per_block = flops_per_token(two, 1) - flops_per_token(one, 1)
    assert per_block == 3 * 2 * 20_000  # a block is two such products
    assert "3x forward" in FLOPS_FORMULA


def test_flops_equal_what_torch_counts() -> None:
    """torch's counter over forward and backward, attention by explicit products (no causal
    skip)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = ModelConfig(vocab_size=50, dim=32, layers=3, heads=4, kv_heads=2, activation="swiglu")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    module = build(model, seed=0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(model, 16) * 2 * 16


def test_external_models_are_refused_by_name() -> None:
    external = ModelConfig(kind="external", target="my.model:Net")
    assert not is_built_in(external)
    with pytest.raises(ModelError, match=r"my\.model:Net.*meta device"):
        param_specs(external)


def test_a_trillion_parameters_without_torch() -> None:
    """In a process of its own: nothing here may import torch."""
    code = (
        "import sys\n"
        "from zeroexp.config.sections import ModelConfig\n"
        "from zeroexp.models.specs import num_params, flops_per_token\n"
        "m = ModelConfig(vocab_size=51200, dim=25600, layers=128, heads=160)\n"
        "flops_per_token(m, 2048)\n"
        "print(num_params(m), 'torch' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    count = 128 * (12 * 25600**2 + 2 * 25600) + 25600 + 51200 * 25600
    assert out.stdout.split() == [str(count), "False"]
