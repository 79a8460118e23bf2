"""One expert a token (Switch Transformer, arXiv:2101.03961)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroexp.errors import Problem
from zeroexp.moe.draws import gumbel_like
from zeroexp.moe.token_choice import Choice, TokenChoiceGate


class Top1Gate(TokenChoiceGate):
    """The expert of the highest probability, weighted by that probability as it is: normalised
    over one choice it would be 1, and the gate would get no gradient.

    ``gumbel``: in training the expert is drawn with its probability.
    """

    options = ("gumbel",)
    can_bias = True

    def __init__(self, *args: Any, gumbel: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gumbel = gumbel

    def problems(self) -> list[Problem]:
        found = super().problems()
        if self.top_k != 1:
            found.append(Problem("top_k", f"{self.top_k} with the gate top1.", "use 1, or topk"))
        return found

    @property
    def noisy(self) -> bool:
        return super().noisy or self.gumbel

    def choose(
        self, logits_SE: Tensor, probs_SE: Tensor, generator: torch.Generator | None
    ) -> Choice:
        if generator is not None and self.gumbel:
            scores_SE = self.for_selection(logits_SE) + gumbel_like(logits_SE, generator)
        else:
            scores_SE = self.for_selection(probs_SE)
        expert_S1 = scores_SE.argmax(dim=1, keepdim=True)
        return Choice(expert_S1, probs_SE.gather(1, expert_S1))

    def weigh(self, values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
        return values_SK
