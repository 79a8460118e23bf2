"""DeepSpeed's MoE layer, its experts spread over all ranks.

Its defaults are kept but for what is drawn at random (which tokens are dropped, which expert is the
second), so that outputs can be compared, and for ``drop_tokens`` where nothing shall be dropped.
"""

from __future__ import annotations

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # lives in .venv-peers
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn

from benchmarks.moe_work import BALANCE_LOSS, MoeLayer, MoeWork


def build(work: MoeWork) -> MoeLayer:
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    expert = nn.Sequential(
        nn.Linear(work.d_model, work.hidden), nn.GELU(), nn.Linear(work.hidden, work.d_model)
    )
    layer = MoE(
        work.d_model,
        expert,
        num_experts=work.experts,
        ep_size=size,
        k=work.top_k,
        capacity_factor=1.0 if work.capacity is None else work.capacity,
        drop_tokens=work.capacity is not None,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    gate = layer.deepspeed_moe.gate.wg.weight
    experts = layer.deepspeed_moe.experts
    local = work.experts // size
    weights = work.weights(range(rank * local, (rank + 1) * local))
    with torch.no_grad():
        gate.copy_(work.gate())
        for own, values in zip(experts.deepspeed_experts, zip(*weights, strict=True), strict=True):
            for parameter, value in zip(own.parameters(), values, strict=True):
                parameter.copy_(value.t())  # of a bias, itself

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y, loss, _ = layer(x)
        return y, BALANCE_LOSS * loss

    return MoeLayer(forward, [gate], list(experts.parameters()))
