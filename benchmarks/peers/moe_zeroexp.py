"""zeroexp's MoE layer, its experts spread over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe_work import BALANCE_LOSS, MoeLayer, MoeWork
from zeroexp.comm.p2p import P2PGroup
from zeroexp.ledger import Ledger
from zeroexp.moe import MLP, MoE, auxiliary_loss
from zeroexp.moe.experts import GroupedExperts


def build(work: MoeWork) -> MoeLayer:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = None
    if size > 1:
        group = P2PGroup(dist.new_group(), range(size), rank, Ledger(), timeout=600.0)
    layer = MoE(
        work.d_model,
        MLP(work.hidden),
        work.experts,
        work.top_k,
        capacity_factor=work.capacity,
        balance_loss=BALANCE_LOSS,
        group=group,
    )
    experts = layer.experts
    assert isinstance(experts, GroupedExperts)  # what MLP makes
    own = (experts.up, experts.up_bias, experts.down, experts.down_bias)
    with torch.no_grad():
        layer.gate.weight.copy_(work.gate())
        for parameter, value in zip(own, work.weights(experts.ids), strict=True):
            assert parameter is not None
            parameter.copy_(value)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, auxiliary_loss(layer)

    return MoeLayer(forward, [layer.gate.weight], list(experts.parameters()))
