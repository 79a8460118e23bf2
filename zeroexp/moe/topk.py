"""The K best experts of every token."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from zeroexp.moe.token_choice import Choice, TokenChoiceGate, share_of_kept


class TopKGate(TokenChoiceGate):
    """The ``top_k`` highest probabilities; with ``normalize`` and K > 1 the weights of those that
    had a place sum to 1, else they are the probabilities."""

    options: ClassVar[tuple[str, ...]] = ("normalize",)
    can_bias = True

    def __init__(self, *args: Any, normalize: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.normalize = normalize

    def choose(
        self, logits_SE: Tensor, probs_SE: Tensor, generator: torch.Generator | None
    ) -> Choice:
        experts_SK = self.for_selection(probs_SE).topk(self.top_k, dim=1).indices
        return Choice(experts_SK, probs_SE.gather(1, experts_SK))

    def weigh(self, values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
        # A single choice normalised is 1 whatever the gate says: it would get no gradient.
        if not self.normalize or self.top_k == 1:
            return values_SK
        return share_of_kept(values_SK, kept_SK)
