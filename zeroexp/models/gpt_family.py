"""The shape of the GPT: parameters and matrix products, counted without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.errors import ConfigError, Problem
from zeroexp.layout import ParamSpec
from zeroexp.models.family import LOSS_BYTES, TOKEN_ID_BYTES, Family, block_shapes, head_shape
from zeroexp.plan.layer_shape import LayerShape

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


def param_specs(model: ModelConfig, moe: MoeConfig) -> list[ParamSpec]:
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

    def mlp(name: str, hidden: int) -> None:
        if model.activation == "swiglu":
            linear(f"{name}.gate", hidden, dim)
        linear(f"{name}.up", hidden, dim)
        linear(f"{name}.down", dim, hidden)

    def stacked(name: str, *shape: int) -> None:
        specs.append(ParamSpec(name, (moe.experts, *shape), spread=moe.expert_parallel))

    def experts(name: str) -> None:
        specs.append(ParamSpec(f"{name}.gate.weight", (moe.experts, dim)))
        hidden = model.hidden_size
        # As zeroexp.moe stacks them: all experts in one tensor, input before output.
        inner = ("up", "gate") if model.activation == "swiglu" else ("up",)
        for part in inner:
            stacked(f"{name}.experts.{part}", dim, hidden)
        stacked(f"{name}.experts.down", hidden, dim)
        if model.bias:
            for part in inner:
                stacked(f"{name}.experts.{part}_bias", hidden)
            stacked(f"{name}.experts.down_bias", dim)
        if moe.shared:
            mlp(f"{name}.shared", moe.shared * hidden)
        if moe.residual:
            mlp(f"{name}.residual", hidden)
            linear(f"{name}.mix", 2, dim, bias=True)

    for i in range(model.layers):
        block = f"blocks.{i}"
        norm(f"{block}.attention_norm")
        linear(f"{block}.attention.q", dim, dim)
        linear(f"{block}.attention.k", kv_dim, dim, bias=False)
        linear(f"{block}.attention.v", kv_dim, dim)
        linear(f"{block}.attention.out", dim, dim)
        norm(f"{block}.mlp_norm")
        if moe.in_block(i):
            experts(f"{block}.mlp")
        else:
            mlp(f"{block}.mlp", model.hidden_size)
    norm("norm")
    if not model.tied:
        specs.append(ParamSpec("head.weight", (model.vocab_size, dim)))
    return specs


def _expert_weights(model: ModelConfig) -> int:
    return (3 if model.activation == "swiglu" else 2) * model.dim * model.hidden_size


def matmul_weights(model: ModelConfig, moe: MoeConfig) -> int:
    """Elements of the projections, the MLPs and the head (counted whether tied or not; the
    embedding is a look-up). Of experts those that one token takes, and the gate."""
    attention = 2 * model.dim**2 + 2 * model.dim * model.num_kv_heads * head_dim(model)
    blocks = moe.num_blocks(model.layers)
    dense = model.layers * attention + (model.layers - blocks) * _expert_weights(model)
    return dense + blocks * _sparse_weights(model, moe) + model.vocab_size * model.dim


def _sparse_weights(model: ModelConfig, moe: MoeConfig) -> int:
    """The experts that one token takes, the gate, and what mixes them with a dense MLP."""
    taken = moe.num_choices + moe.shared + moe.residual
    return taken * _expert_weights(model) + (moe.experts + 2 * moe.residual) * model.dim


def _gate_bytes(moe: MoeConfig) -> int:
    """What the gate keeps of a token: scores and shares in fp32, places and weights."""
    return 8 * moe.experts + round(moe.rows_per_token * 20)


def idle_params(model: ModelConfig, moe: MoeConfig) -> int:
    """Elements of the experts that one token does not take."""
    each = _expert_weights(model)
    if model.bias:
        each += model.dim + (2 if model.activation == "swiglu" else 1) * model.hidden_size
    return moe.num_blocks(model.layers) * (moe.experts - moe.num_choices) * each


def attention_width(model: ModelConfig) -> int:
    return model.layers * model.heads * head_dim(model)


def layer_shapes(model: ModelConfig, moe: MoeConfig, recompute: bool) -> list[LayerShape]:
    """Kept elements are those of the module on the CPU, with attention that keeps no scores; what
    the rotary tables add does not grow with the batch and is left out. Of experts they are those
    of tokens that all find a place."""
    dim, vocab = model.dim, model.vocab_size
    kv_dim = model.num_kv_heads * head_dim(model)
    # Input and normalised input with its scale, or input, mean and scale.
    norm = 2 * dim + 1 if model.norm == "rmsnorm" else dim + 2
    # Its output; queries, keys and values; result and log-sum of each head. Rotated queries leave
    # the heads in another order, which costs a copy of the result.
    attention = norm + dim + dim + 2 * kv_dim + dim + model.heads
    if model.positions == "rotary":
        attention += dim
    hidden = (4 if model.activation == "swiglu" else 2) * model.hidden_size
    mlp = norm + dim + hidden
    dropped = dim if model.dropout else 0
    projections = 2 * dim**2 + 2 * dim * kv_dim
    dense = LayerShape(
        "",
        (),
        dim,
        weights=projections + _expert_weights(model),
        attention=model.heads * head_dim(model),
        kept=dim if recompute else attention + mlp + 2 * dropped,
        recomputed=recompute,
    )
    rows, inner = moe.rows_per_token, (2 if model.activation == "swiglu" else 1) * model.hidden_size
    # Of each row an expert's input, its hidden layer before the activation, and its output.
    experts = norm + dim + round(rows * (2 * dim + inner)) + moe.shared * hidden
    experts += moe.residual * (hidden + 2 * dim)
    sparse = replace(
        dense,
        weights=projections + _sparse_weights(model, moe),
        kept=dim if recompute else attention + experts + 2 * dropped,
        kept_bytes=0 if recompute else _gate_bytes(moe),
    )
    blocks = [sparse if moe.in_block(i) else dense for i in range(model.layers)]
    shapes = [
        LayerShape(
            "embedding",
            ("embedding.", "positions."),
            dim,
            kept=dropped,
            kept_bytes=TOKEN_ID_BYTES,
        ),
        *block_shapes(blocks),
        LayerShape("norm", ("norm.",), dim, kept=norm),
    ]
    if moe.makes_losses:  # they go to the last stage beside what blocks give on
        made = [moe.num_blocks(min(i, model.layers)) for i in range(len(shapes))]
        shapes = [
            replace(shape, beside=LOSS_BYTES * n) for shape, n in zip(shapes, made, strict=True)
        ]
    return [*shapes, head_shape(dim, vocab)]


def _build(model: ModelConfig, moe: MoeConfig, recompute: bool) -> nn.Module:
    from zeroexp.models.gpt import GPT

    return GPT(model, moe, recompute=recompute)


GPT_FAMILY = Family(param_specs, matmul_weights, idle_params, attention_width, layer_shapes, _build)
