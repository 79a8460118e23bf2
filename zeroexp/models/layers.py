"""Layers that draw their own weights, so that a model can be built unit by unit.

Every module with parameters has ``reset_parameters()``: what deferred initialisation (meta device,
then materialise) calls, and what the constructor calls too, so both draw the same numbers in the
same order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INIT_STD = 0.02
"""Standard deviation of weights (GPT-2); projections back into the residual stream divide it by
sqrt(2 * layers)."""


class Linear(nn.Linear):
    """``nn.Linear`` with weights from N(0, std^2) and a zero bias."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, std: float = INIT_STD
    ) -> None:
        self.std = std  # read by reset_parameters, which the base constructor calls
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` with weights from N(0, 0.02^2)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def rotary_tables(
    length: int, head_dim: int, device: torch.device, dtype: torch.dtype, base: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each (length, head_dim / 2), in fp32 or wider.

    RoFormer (arXiv:2104.09864) with frequencies ``base**(-2i/head_dim)``. Computed anew in every
    forward pass: it costs next to nothing, and a model without buffers has none to lose on the meta
    device or in a dtype conversion.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent_D = torch.arange(0, head_dim, 2, device=device, dtype=wide) / head_dim
    angle_LD = torch.outer(torch.arange(length, device=device, dtype=wide), base**-exponent_D)
    return angle_LD.cos(), angle_LD.sin()


def rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head by their position's angle; same shape and dtype as
    ``x_BHLD``."""
    a, b = x_BHLD.chunk(2, dim=-1)
    return torch.cat((a * cos_LD - b * sin_LD, b * cos_LD + a * sin_LD), dim=-1).to(x_BHLD.dtype)
