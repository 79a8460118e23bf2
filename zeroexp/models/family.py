"""What a built-in model consists of, so far as the rest of zeroexp cares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroexp.config.sections import ModelConfig
from zeroexp.layout import ParamSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Family:
    """One value of ``model.kind``. Importing a family's file imports no torch; only ``build`` does,
    when called.

    ``param_specs(model)``: names and shapes in the order of the module's ``named_parameters()``.
    ``matmul_weights(model)``: elements of all weights that one token is multiplied with.
    ``attention_width(model)``: layers x heads x head dimension (0 without attention).
    ``build(model, recompute)``: the module, its weights drawn from torch's current generator.
    """

    param_specs: Callable[[ModelConfig], list[ParamSpec]]
    matmul_weights: Callable[[ModelConfig], int]
    attention_width: Callable[[ModelConfig], int]
    build: Callable[[ModelConfig, bool], nn.Module]
