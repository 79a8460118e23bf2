"""What a built-in model consists of, so far as the rest of zeroexp cares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.layout import ParamSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Family:
    """One value of ``model.kind``. Importing a family's file imports no torch; only ``build`` does,
    when called.

    ``param_specs(model, moe)``: names and shapes in the order of the module's
    ``named_parameters()``.
    ``matmul_weights(model, moe)``: elements of all weights that one token is multiplied with.
    ``idle_params(model, moe)``: elements of the experts that a token leaves out.
    ``attention_width(model)``: layers x heads x head dimension (0 without attention).
    ``build(model, moe, recompute)``: the module, its weights drawn from torch's current generator.
    """

    param_specs: Callable[[ModelConfig, MoeConfig], list[ParamSpec]]
    matmul_weights: Callable[[ModelConfig, MoeConfig], int]
    idle_params: Callable[[ModelConfig, MoeConfig], int]
    attention_width: Callable[[ModelConfig], int]
    build: Callable[[ModelConfig, MoeConfig, bool], nn.Module]
