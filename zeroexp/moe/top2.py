"""Two experts a token (GShard, arXiv:2006.16668)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroexp.config.nearest import nearest
from zeroexp.errors import Problem
from zeroexp.moe.draws import gumbel_like
from zeroexp.moe.routing import count
from zeroexp.moe.token_choice import Choice, TokenChoiceGate, share_of_kept

SECOND = ("argmax", "gumbel", "skip")


class Top2Gate(TokenChoiceGate):
    """The best expert and a second one; the weights of those that had a place sum to 1.

    ``second``, in training (in eval always ``argmax``):

    ``argmax``
        the second best.
    ``gumbel``
        drawn from the others with their probabilities (DeepSpeed's second-expert sampling).
    ``skip``
        the second best, with probability ``min(1, 2 * g2 / (g1 + g2))`` (GShard, algorithm 1);
        weights are then shares of both, sent or not.
    """

    options = ("second",)

    def __init__(self, *args: Any, second: str = "argmax", **options: Any) -> None:
        super().__init__(*args, **options)
        self.second = second

    def problems(self) -> list[Problem]:
        found = super().problems()
        if self.top_k != 2:
            found.append(Problem("top_k", f"{self.top_k} with the gate top2.", "use 2, or topk"))
        if self.second not in SECOND:
            close = nearest(self.second, SECOND) or SECOND
            problem = f"{self.second!r} is not known."
            found.append(Problem("second", problem, f"use {' or '.join(close)}"))
        return found

    @property
    def noisy(self) -> bool:
        return super().noisy or self.second != "argmax"

    def choose(
        self, logits_SE: Tensor, probs_SE: Tensor, generator: torch.Generator | None
    ) -> Choice:
        scores_SE = logits_SE.detach()
        first_S1 = scores_SE.argmax(dim=1, keepdim=True)
        if generator is not None and self.second == "gumbel":
            scores_SE = scores_SE + gumbel_like(scores_SE, generator)
        second_S1 = scores_SE.scatter(1, first_S1, -torch.inf).argmax(dim=1, keepdim=True)
        experts_SK = torch.cat((first_S1, second_S1), dim=1)
        values_SK = probs_SE.gather(1, experts_SK)
        wanted_SK = None
        if generator is not None and self.second == "skip":
            share_S = share_of_kept(values_SK.detach(), None)[:, 1]
            chance_S = torch.rand(
                share_S.shape, generator=generator, device=share_S.device, dtype=share_S.dtype
            )
            sent_S = 2 * share_S > chance_S
            wanted_SK = torch.stack((torch.ones_like(sent_S), sent_S), dim=1)
        return Choice(experts_SK, values_SK, wanted_SK)

    def weigh(self, values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
        if self.training and self.second == "skip":
            kept_SK = None
        return share_of_kept(values_SK, kept_SK)

    def fraction(self, choice: Choice, load_E: Tensor) -> Tensor:
        # First choices only: GShard's c_e, which a second choice would double.
        first_S = choice.experts_SK[:, 0]
        first_E = count(first_S, self.num_experts).to(choice.values_SK.dtype)
        return first_E / max(first_S.numel(), 1)
