"""Mixture of experts token by token, in Python lists: what the layer must equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroexp.moe import MoE
from zeroexp.moe.experts import GroupedExperts

Assignment = tuple[int, int, Tensor]
"""Token, expert, weight."""


def in_turn(wishes: list[tuple[int, int]], places: int) -> set[tuple[int, int]]:
    """The (token, expert) wishes that find a place, first come first served."""
    taken: dict[int, int] = {}
    kept = set()
    for token, expert in wishes:
        if taken.get(expert, 0) < places:
            taken[expert] = taken.get(expert, 0) + 1
            kept.add((token, expert))
    return kept


def decide(
    kind: str,
    logits: Tensor,
    k: int,
    places: int | None = None,
    *,
    priority: str = "position",
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> list[Assignment]:
    """All assignments of a batch in eval, with differentiable weights."""
    tokens, experts = logits.shape
    limit = tokens * k if places is None else places
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(1)
    table = (scores if bias is None else scores + bias).detach().tolist()
    out: list[Assignment] = []
    if kind == "expert_choice":
        take = min(tokens, math.ceil(tokens / experts * k) if places is None else places)
        for e in range(experts):
            best = sorted(range(tokens), key=lambda s: -table[s][e])[:take]
            out += [(s, e, scores[s, e]) for s in best]
        return out
    chosen = [sorted(range(experts), key=lambda e: -row[e])[:k] for row in table]
    if priority == "choice":
        wishes = [(s, chosen[s][j]) for j in range(k) for s in range(tokens)]
    else:
        wishes = [(s, e) for s in range(tokens) for e in chosen[s]]
    if priority == "probs":
        value = scores.detach().tolist()
        wishes.sort(key=lambda wish: -value[wish[0]][wish[1]])
    kept = in_turn(wishes, limit)
    for s in range(tokens):
        mine = [e for e in chosen[s] if (s, e) in kept]
        for e in mine:
            weight = scores[s, e]
            if k > 1:
                weight = weight / torch.stack([scores[s, other] for other in mine]).sum()
            out.append((s, e, weight * scale))
    return out


def single_experts(layer: MoE) -> list[Callable[[Tensor], Tensor]]:
    """Each expert of the layer as a function of rows."""
    found = layer.experts
    if not isinstance(found, GroupedExperts):
        return [expert for _, expert in found.named_children()]

    def one(e: int) -> Callable[[Tensor], Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return x @ weight[e] + (0 if bias is None else bias[e])

        def run(x: Tensor) -> Tensor:
            h = linear(x, found.up, found.up_bias)
            if found.gate is not None:
                h = F.silu(linear(x, found.gate, found.gate_bias)) * h
            else:
                h = F.gelu(h)
            return linear(h, found.down, found.down_bias)

        return run

    return [one(e) for e in range(len(found.ids))]


def plain_forward(layer: MoE, x: Tensor, kind: str, **decision: Any) -> Tensor:
    """The routed part of ``layer(x)`` for tokens ``x`` [S, C]."""
    logits = x @ layer.gate.weight.t()
    experts = single_experts(layer)
    rows = [torch.zeros(x.shape[1], dtype=x.dtype) for _ in range(x.shape[0])]
    for s, e, weight in decide(kind, logits, layer.gate.top_k, **decision):
        rows[s] = rows[s] + weight * experts[e](x[s : s + 1])[0]
    return torch.stack(rows)


def gradients(layer: nn.Module, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the input and of every parameter, zeros where there are none."""
    named = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(named.items(), found, strict=True)
    }
