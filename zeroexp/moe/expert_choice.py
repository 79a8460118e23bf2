"""Experts choose tokens (Zhou et al., arXiv:2202.09368).

Every expert is full and none is overfull, so there is nothing to balance. But whether a token is
taken depends on all tokens of the batch, those that come later included: **not causal**. A language
model trained with it sees the future through its gates (arXiv:2408.15664, appendix D, bounds the
leak), and generates worse than its loss says. Meant for encoders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroexp.errors import Problem
from zeroexp.moe.gate import Gate
from zeroexp.moe.routing import Routing


class ExpertChoiceGate(Gate):
    """Every expert takes its ``ceil(S / E * capacity_factor * top_k)`` best tokens, at most all S;
    a token has ``top_k * capacity_factor`` experts on average. Weights are the probabilities over
    experts. Without a capacity factor it is 1.
    """

    chosen_by_tokens = False

    @property
    def causal(self) -> bool:
        return False

    def problems(self) -> list[Problem]:
        found = super().problems()
        if self.capacity.priority != "position":
            problem = "experts that choose turn nobody away."
            found.append(Problem("priority", problem, "leave it out"))
        return found

    def route(self, logits_SE: Tensor, generator: torch.Generator | None) -> Routing:
        tokens, experts = logits_SE.shape
        probs_SE = logits_SE.softmax(dim=1)
        places = self.places(tokens)
        if places is None:
            places = math.ceil(tokens / experts * self.top_k)
        places = min(places, tokens)
        token_EP = probs_SE.detach().t().topk(places, dim=1).indices.sort(dim=1).values
        counts_E = torch.full((experts,), places, dtype=torch.int64, device=logits_SE.device)
        return Routing(
            token_A=token_EP.reshape(-1),
            weight_A=probs_SE.t().gather(1, token_EP).reshape(-1),
            counts_E=counts_E,
            load_E=counts_E,
            logits_SE=logits_SE,
            probs_SE=probs_SE,
            fraction_E=logits_SE.new_full((experts,), 1 / experts),
            chosen_SK=None,
        )
