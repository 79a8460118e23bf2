"""The shape of the GPT: parameters and matrix products, counted without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig
from zeroexp.errors import ConfigError, Problem
from zeroexp.layout import ParamSpec
from zeroexp.models.family import Family

if TYPE_CHECKING:
    from torch import nn


def head_dim(model: ModelConfig) -> int:
    """Width of one attention head.

    Raises :class:`ConfigError` where heads do not divide the width, or a head cannot be rotated.
    """
    problems = []
    if model.dim % model.heads:
        problems.append(
            Problem(
                "model.heads",
                f"{model.heads} does not divide model.dim={model.dim}.",
                "Choose a divisor of dim",
            )
        )
    elif model.positions == "rotary" and model.dim // model.heads % 2:
        problems.append(
            Problem(
                "model.positions",
                f"rotary turns pairs, but a head is {model.dim // model.heads} wide.",
                "Make dim / heads even, or use model.positions=learned",
            )
        )
    if model.heads % model.num_kv_heads:
        problems.append(
            Problem(
                "model.kv_heads",
                f"{model.num_kv_heads} does not divide model.heads={model.heads}.",
                "Choose a divisor of heads",
            )
        )
    if problems:
        raise ConfigError(problems)
    return model.dim // model.heads


def param_specs(model: ModelConfig) -> list[ParamSpec]:
    """The GPT's parameters in module order; a tied head is an alias of the embedding."""
    dim, kv_dim = model.dim, model.num_kv_heads * head_dim(model)
    specs = [
        ParamSpec(
            "embedding.weight",
            (model.vocab_size, dim),
            aliases=("head.weight",) if model.tied else (),
        )
    ]
    if model.positions == "learned":
        specs.append(ParamSpec("positions.weight", (model.max_seq_len, dim)))

    def linear(name: str, rows: int, columns: int, bias: bool = model.bias) -> None:
        specs.append(ParamSpec(f"{name}.weight", (rows, columns)))
        if bias:
            specs.append(ParamSpec(f"{name}.bias", (rows,)))

    def norm(name: str) -> None:
        specs.append(ParamSpec(f"{name}.weight", (dim,)))
        if model.norm == "layernorm" and model.bias:
            specs.append(ParamSpec(f"{name}.bias", (dim,)))

    for i in range(model.layers):
        block = f"blocks.{i}"
        norm(f"{block}.attention_norm")
        linear(f"{block}.attention.q", dim, dim)
        linear(f"{block}.attention.k", kv_dim, dim, bias=False)
        linear(f"{block}.attention.v", kv_dim, dim)
        linear(f"{block}.attention.out", dim, dim)
        norm(f"{block}.mlp_norm")
        if model.activation == "swiglu":
            linear(f"{block}.mlp.gate", model.hidden_size, dim)
        linear(f"{block}.mlp.up", model.hidden_size, dim)
        linear(f"{block}.mlp.down", dim, model.hidden_size)
    norm("norm")
    if not model.tied:
        specs.append(ParamSpec("head.weight", (model.vocab_size, dim)))
    return specs


def matmul_weights(model: ModelConfig) -> int:
    """Elements of the projections, the MLPs and the head (counted whether tied or not; the
    embedding is a look-up)."""
    attention = 2 * model.dim**2 + 2 * model.dim * model.num_kv_heads * head_dim(model)
    mlp = (3 if model.activation == "swiglu" else 2) * model.dim * model.hidden_size
    return model.layers * (attention + mlp) + model.vocab_size * model.dim


def attention_width(model: ModelConfig) -> int:
    return model.layers * model.heads * head_dim(model)


def _build(model: ModelConfig, recompute: bool) -> nn.Module:
    from zeroexp.models.gpt import GPT

    return GPT(model, recompute=recompute)


GPT_FAMILY = Family(param_specs, matmul_weights, attention_width, _build)
