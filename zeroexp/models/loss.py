"""The loss of the language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target of a position that counts for nothing (padding)."""


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not :data:`IGNORED`; 0 if all are.

    Computed in fp32 or wider whatever the dtype of the logits; a scalar of that dtype.
    """
    wide = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    total = F.cross_entropy(
        wide.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / num_targets(targets_BL).clamp(min=1)


def num_targets(targets_BL: Tensor) -> Tensor:
    """How many targets count: an int64 scalar on the targets' device."""
    return (targets_BL != IGNORED).sum()
