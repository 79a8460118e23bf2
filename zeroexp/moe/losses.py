"""What a gate pays for unbalanced or extreme scores. Scalars in the dtype of their input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from zeroexp.errors import Problem
from zeroexp.moe.routing import Routing


def load_balance(probs_SE: Tensor, fraction_E: Tensor) -> Tensor:
    """``E * sum_e f_e * P_e`` (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961, eq. 4).

    P is the mean of ``probs_SE`` over tokens, f the share of choices that fell on e before any was
    dropped: first choices for top-1 and top-2, all K of them over S x K for top-k (DeepSpeed's
    ``E^2 / k * mean_e``). 1 where all is even.
    """
    tokens, experts = probs_SE.shape
    mean_E = probs_SE.sum(0) / max(tokens, 1)  # a rank may have no token
    return experts * (fraction_E.to(mean_E.dtype) * mean_E).sum()


def router_z(logits_SE: Tensor) -> Tensor:
    """Mean over tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits_SE.logsumexp(dim=1).square().sum() / max(logits_SE.shape[0], 1)


def sequence_balance(probs_SE: Tensor, chosen_SK: Tensor, num_sequences: int) -> Tensor:
    """:func:`load_balance` of every sequence by itself, averaged (DeepSeek-V3, arXiv:2412.19437,
    eq. 17-20).

    Tokens lie sequence after sequence, equally many each; ``probs_SE`` sum to 1 per token. f counts
    the experts that were chosen, so what a bias moved is seen.
    """
    tokens, experts = probs_SE.shape
    k = chosen_SK.shape[1]
    if tokens == 0:
        return probs_SE.sum()
    length = tokens // num_sequences
    sequence_S = torch.arange(num_sequences, device=probs_SE.device).repeat_interleave(length)
    cell_SK = sequence_S.unsqueeze(1) * experts + chosen_SK
    counts = torch.zeros(num_sequences * experts, dtype=probs_SE.dtype, device=probs_SE.device)
    counts.index_add_(0, cell_SK.reshape(-1), counts.new_ones(tokens * k))
    fraction_BE = counts.view(num_sequences, experts) / (length * k)
    mean_BE = probs_SE.view(num_sequences, length, experts).mean(1)
    return experts * (fraction_BE * mean_BE).sum(1).mean()


@dataclass(frozen=True)
class LossWeights:
    """What each loss is multiplied with; 0: it is not computed."""

    balance: float = 0.0
    z: float = 0.0
    sequence: float = 0.0

    @property
    def count(self) -> int:
        """How many losses there are."""
        return sum(weight != 0 for weight in asdict(self).values())

    def problems(self) -> list[Problem]:
        """What is wrong with the weights."""
        return [
            Problem(f"{name}_loss", f"{weight} is not a weight.", "use 0 or more, e.g. 0.01")
            for name, weight in asdict(self).items()
            if not 0 <= weight < math.inf
        ]

    def losses(self, routing: Routing, num_sequences: int) -> dict[str, Tensor]:
        """The losses that count, before they are weighted."""
        found = {}
        if self.balance:
            found["balance"] = load_balance(routing.probs_SE, routing.fraction_E)
        if self.z:
            found["z"] = router_z(routing.logits_SE)
        if self.sequence and routing.chosen_SK is not None:
            found["sequence"] = sequence_balance(routing.probs_SE, routing.chosen_SK, num_sequences)
        return found

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of at least one loss."""
        terms = [getattr(self, name) * loss for name, loss in losses.items()]
        return torch.stack(terms).sum()
