"""The MLP that does for every token what its ``top_k`` experts would: as wide as these together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.moe_work import MoeLayer, MoeWork


def build(work: MoeWork) -> MoeLayer:
    up, up_bias, down, down_bias = work.weights(range(work.top_k))
    wide = work.top_k * work.hidden
    layer = nn.Sequential(nn.Linear(work.d_model, wide), nn.GELU(), nn.Linear(wide, work.d_model))
    values = (up.transpose(1, 2), up_bias, down.transpose(1, 2).permute(1, 0, 2), down_bias.sum(0))
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.copy_(value.reshape(parameter.shape))

    def forward(x: Tensor) -> tuple[Tensor, None]:
        return layer(x), None

    return MoeLayer(forward, [], list(layer.parameters()))
