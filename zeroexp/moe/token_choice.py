"""What the gates share in which every token chooses K experts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroexp.moe.gate import Gate
from zeroexp.moe.routing import Routing, count, keep_first, sorted_slots


@dataclass
class Choice:
    """``experts_SK`` int64 and the differentiable ``values_SK`` of their scores; ``wanted_SK``
    (bool) is False where a choice is given up at random, None where none is."""

    experts_SK: Tensor
    values_SK: Tensor
    wanted_SK: Tensor | None = None


class TokenChoiceGate(Gate):
    """Scores, selection, places, weights, in that order; a gate defines each of them."""

    def probabilities(self, logits_SE: Tensor) -> Tensor:
        """Scores as shares of 1 per token."""
        return logits_SE.softmax(dim=1)

    @abstractmethod
    def choose(
        self, logits_SE: Tensor, probs_SE: Tensor, generator: torch.Generator | None
    ) -> Choice:
        """K experts for every token."""

    @abstractmethod
    def weigh(self, values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
        """The weights of the kept choices ``[S, K]`` (kept None: all are)."""

    def fraction(self, choice: Choice, load_E: Tensor) -> Tensor:
        """The share of each expert that the balance loss counts."""
        return load_E.to(choice.values_SK.dtype) / max(choice.experts_SK.numel(), 1)

    def route(self, logits_SE: Tensor, generator: torch.Generator | None) -> Routing:
        probs_SE = self.probabilities(logits_SE)
        choice = self.choose(logits_SE, probs_SE, generator)
        tokens, k = choice.experts_SK.shape
        kept_SK = choice.wanted_SK
        load_E = self._count(choice.experts_SK, kept_SK)
        counts_E = load_E
        places = self.places(tokens)
        if places is not None:
            kept_SK = keep_first(
                choice.experts_SK,
                choice.values_SK,
                choice.wanted_SK,
                num_experts=self.num_experts,
                places=places,
                priority=self.capacity.priority,
                generator=generator,
            )
            counts_E = load_E.clamp_max(places)
        slots_A = sorted_slots(choice.experts_SK, kept_SK)
        return Routing(
            token_A=slots_A // k,
            weight_A=self.weigh(choice.values_SK, kept_SK).reshape(-1)[slots_A],
            counts_E=counts_E,
            load_E=load_E,
            logits_SE=logits_SE,
            probs_SE=probs_SE,
            fraction_E=self.fraction(choice, load_E),
            chosen_SK=choice.experts_SK,
        )

    def _count(self, experts_SK: Tensor, wanted_SK: Tensor | None) -> Tensor:
        if wanted_SK is None:
            return count(experts_SK, self.num_experts)
        marked = experts_SK.masked_fill(~wanted_SK, self.num_experts)
        return count(marked, self.num_experts + 1)[:-1]


def share_of_kept(values_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
    """Values over the sum of the kept ones, ``[S, K]``; a token that keeps none gets zeros."""
    kept = values_SK if kept_SK is None else values_SK * kept_SK
    eps = torch.finfo(values_SK.dtype).eps
    return kept / kept.sum(dim=1, keepdim=True).clamp_min(eps)
