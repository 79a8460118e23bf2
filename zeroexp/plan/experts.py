"""Tokens on their way to experts of other ranks and back."""

from __future__ import annotations

from zeroexp.config import Config
from zeroexp.layout import ITEMSIZE
from zeroexp.plan.formats import NAMES


def all_to_all_bytes(config: Config, blocks: int) -> int:
    """What a rank with ``blocks`` blocks of experts sends in one step where all experts get equally
    many tokens.

    There and back, in forward and in backward: ``4 * S * k * h * B * (EP - 1) / EP`` per layer
    (DeepSpeed-MoE, arXiv:2201.05596); recomputation sends those of forward again. How many tokens
    really leave a rank its gates decide.
    """
    moe, ranks = config.moe, config.moe.expert_parallel
    if moe.kind == "none" or ranks == 1:
        return 0
    tokens = config.batch_size // config.data_ranks * config.data.seq_len
    rows = tokens * moe.rows_per_token * (ranks - 1) / ranks
    times = 6 if config.recompute.kind == "full" else 4
    width = config.model.dim * ITEMSIZE[NAMES[config.precision.compute]]
    return round(times * rows * width) * blocks
