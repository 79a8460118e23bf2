"""Experts scored independently of each other (DeepSeek-V3, arXiv:2412.19437, eq. 12-16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroexp.moe.token_choice import Choice
from zeroexp.moe.topk import TopKGate


class SigmoidGate(TopKGate):
    """The ``top_k`` highest of sigmoid(logit) + bias; the bias only selects. Weights are the scores
    (``normalize`` and K > 1: over their sum) times ``scale``."""

    options = ("normalize", "scale")

    def __init__(self, *args: Any, scale: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = scale

    def probabilities(self, logits_SE: Tensor) -> Tensor:
        scores_SE = logits_SE.sigmoid()
        eps = torch.finfo(scores_SE.dtype).eps
        return scores_SE / scores_SE.sum(dim=1, keepdim=True).clamp_min(eps)

    def choose(
        self, logits_SE: Tensor, probs_SE: Tensor, generator: torch.Generator | None
    ) -> Choice:
        scores_SE = logits_SE.sigmoid()
        experts_SK = self.for_selection(scores_SE).topk(self.top_k, dim=1).indices
        return Choice(experts_SK, scores_SE.gather(1, experts_SK))

    def weigh(self, values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
        return super().weigh(values_SK, kept_SK) * self.scale
