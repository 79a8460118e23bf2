"""Which token goes to which expert, as lists of indices.

Suffixes of tensor names: S tokens of this rank, E experts, K choices of a token, A assignments that
are carried out (at most S x K), C channels. Nothing here is as large as tokens x experts but the
gate's own scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Routing:
    """The decision of a gate for the tokens of one forward pass.

    ``token_A`` and ``weight_A`` are sorted by expert and, inside an expert, by token; ``counts_E``
    says how many of them each expert has. ``load_E`` counts what was wanted before experts turned
    tokens away. ``logits_SE`` and ``probs_SE`` are fp32 or wider; ``weight_A`` and ``probs_SE``
    carry gradients.
    """

    token_A: Tensor
    weight_A: Tensor
    counts_E: Tensor
    load_E: Tensor
    logits_SE: Tensor
    probs_SE: Tensor
    fraction_E: Tensor
    """The share of each expert that the balance loss counts; sums to 1."""
    chosen_SK: Tensor | None
    """The experts that each token wanted; None where experts choose tokens."""

    @property
    def num_tokens(self) -> int:
        return self.logits_SE.shape[0]


def count(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named, ``[E]`` int64; never waits for the device."""
    flat = experts.reshape(-1)
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))


def keep_first(
    experts_SK: Tensor,
    values_SK: Tensor,
    wanted_SK: Tensor | None,
    *,
    num_experts: int,
    places: int,
    priority: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Which choices find a place, ``[S, K]`` bool: of each expert's the first ``places``.

    ``priority`` as in :class:`zeroexp.moe.capacity.Capacity`; without a ``generator``, ``random``
    is by position.
    """
    tokens, k = experts_SK.shape
    device = experts_SK.device
    # Choices nobody wants queue at an expert of their own, where there is no place.
    queue_SK = experts_SK
    if wanted_SK is not None:
        queue_SK = experts_SK.masked_fill(~wanted_SK, num_experts)
    if priority == "choice":
        order = torch.arange(tokens * k, device=device).view(tokens, k).t().reshape(-1)
    elif priority == "probs":
        order = values_SK.detach().reshape(-1).argsort(descending=True, stable=True)
    elif priority == "random" and generator is not None:
        order = torch.rand(tokens * k, generator=generator, device=device).argsort()
    else:
        order = torch.arange(tokens * k, device=device)
    queued = queue_SK.reshape(-1)[order]
    by_expert = queued.argsort(stable=True)
    counts = count(queued, num_experts + 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(tokens * k, device=device) - starts[queued[by_expert]]
    fits = (place < places) & (queued[by_expert] < num_experts)
    kept = torch.empty_like(fits)
    kept[order[by_expert]] = fits
    return kept.view(tokens, k)


def sorted_slots(experts_SK: Tensor, kept_SK: Tensor | None) -> Tensor:
    """The slots ``token * K + choice`` that are carried out, sorted by expert, then by token:
    ``[A]`` int64."""
    experts = experts_SK.reshape(-1)
    if kept_SK is None:
        return experts.argsort(stable=True)
    slots = kept_SK.reshape(-1).nonzero().squeeze(1)
    return slots[experts[slots].argsort(stable=True)]
