"""The shape of the MLP: parameters and matrix products, counted without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.layout import ParamSpec
from zeroexp.models.family import TOKEN_ID_BYTES, Family, block_shapes, head_shape
from zeroexp.plan.layer_shape import LayerShape

if TYPE_CHECKING:
    from torch import nn


def param_specs(model: ModelConfig, moe: MoeConfig) -> list[ParamSpec]:
    """The MLP's parameters in module order."""
    specs = [ParamSpec("embedding.weight", (model.vocab_size, model.dim))]

    def linear(name: str, rows: int, columns: int) -> None:
        specs.append(ParamSpec(f"{name}.weight", (rows, columns)))
        if model.bias:
            specs.append(ParamSpec(f"{name}.bias", (rows,)))

    for i in range(model.layers):
        linear(f"blocks.{i}.up", model.hidden_size, model.dim)
        linear(f"blocks.{i}.down", model.dim, model.hidden_size)
    specs.append(ParamSpec("head.weight", (model.vocab_size, model.dim)))
    return specs


def matmul_weights(model: ModelConfig, moe: MoeConfig) -> int:
    """Elements of the blocks and the head; the embedding is a look-up."""
    return model.layers * 2 * model.dim * model.hidden_size + model.vocab_size * model.dim


def idle_params(model: ModelConfig, moe: MoeConfig) -> int:
    return 0


def attention_width(model: ModelConfig) -> int:
    return 0


def layer_shapes(model: ModelConfig, moe: MoeConfig, recompute: bool) -> list[LayerShape]:
    dim, hidden, vocab = model.dim, model.hidden_size, model.vocab_size
    # Kept: the input, and the hidden layer before and after its activation.
    block = LayerShape(
        "",
        (),
        dim,
        weights=2 * dim * hidden,
        kept=dim if recompute else dim + 2 * hidden,
        recomputed=recompute,
    )
    return [
        LayerShape("embedding", ("embedding.",), dim, kept_bytes=TOKEN_ID_BYTES),
        *block_shapes([block] * model.layers),
        head_shape(dim, vocab),
    ]


def _build(model: ModelConfig, moe: MoeConfig, recompute: bool) -> nn.Module:
    from zeroexp.models.mlp import MLP

    return MLP(model, recompute=recompute)


MLP_FAMILY = Family(param_specs, matmul_weights, idle_params, attention_width, layer_shapes, _build)
