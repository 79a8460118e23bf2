"""The published table of ZeRO's model state, from the same placement table and layout the engine
uses."""

from __future__ import annotations

from zeroexp.layout import ITEMSIZE, ParamSpec, make_layout
from zeroexp.placement import STAGES


def zero_bytes(
    num_params: int,
    ranks: int,
    stage: int,
    *,
    dtype: str = "bfloat16",
    grad_bytes: int = 2,
    optim_bytes: int = 12,
) -> int:
    """Model-state bytes per rank of ``num_params`` parameters (Rajbhandari et al.,
    arXiv:1910.02054, figure 1).

    ``optim_bytes`` is the paper's K: 12 for Adam with an fp32 master copy. Padding is included.
    """
    layout = make_layout([ParamSpec("all", (num_params,), dtype)], cut="model", shards=ranks)
    placement = STAGES[stage]
    total = 0
    for segment in layout.segments:
        for where, itemsize in (
            (placement.params, ITEMSIZE[dtype]),
            (placement.grads, grad_bytes),
            (placement.optim, optim_bytes),
        ):
            total += (segment.shard_size if where.sharded else segment.size) * itemsize
    return total
