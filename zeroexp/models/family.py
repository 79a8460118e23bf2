"""What a built-in model consists of, so far as the rest of zeroexp cares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.layout import ParamSpec
from zeroexp.plan.layer_shape import LayerShape

if TYPE_CHECKING:
    from torch import nn


TOKEN_ID_BYTES = 8
"""Bytes of a token id on its way through the model (int64)."""

LOSS_BYTES = 4
"""Bytes of a loss, and what it keeps of a logit: its log-probability. Both are in fp32."""


def block_shapes(blocks: Sequence[LayerShape]) -> list[LayerShape]:
    """Blocks under the names that they have in a model."""
    return [
        replace(block, name=f"blocks.{i}", prefixes=(f"blocks.{i}.",))
        for i, block in enumerate(blocks)
    ]


def head_shape(dim: int, vocab: int) -> LayerShape:
    """The head from width ``dim`` to ``vocab`` scores, with the loss on them."""
    return LayerShape(
        "head",
        ("head.",),
        vocab,
        weights=vocab * dim,
        kept=dim,
        kept_bytes=LOSS_BYTES * vocab + TOKEN_ID_BYTES,
    )


@dataclass(frozen=True)
class Family:
    """One value of ``model.kind``. Importing a family's file imports no torch; only ``build`` does,
    when called.

    ``param_specs(model, moe)``: names and shapes in the order of the module's
    ``named_parameters()``.
    ``matmul_weights(model, moe)``: elements of all weights that one token is multiplied with.
    ``idle_params(model, moe)``: elements of the experts that a token leaves out.
    ``attention_width(model)``: layers x heads x head dimension (0 without attention).
    ``layer_shapes(model, moe, recompute)``: the layers that a pipeline can cut between, in order.
    ``build(model, moe, recompute)``: the module, its weights drawn from torch's current generator.
    """

    param_specs: Callable[[ModelConfig, MoeConfig], list[ParamSpec]]
    matmul_weights: Callable[[ModelConfig, MoeConfig], int]
    idle_params: Callable[[ModelConfig, MoeConfig], int]
    attention_width: Callable[[ModelConfig], int]
    layer_shapes: Callable[[ModelConfig, MoeConfig, bool], list[LayerShape]]
    build: Callable[[ModelConfig, MoeConfig, bool], nn.Module]
