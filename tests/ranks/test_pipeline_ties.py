"""Weights that several stages hold: one gradient, the same bits, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_lab import Pipe, gather_weights, plain_losses, scheduled
from small import furthest, rank
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.config.sections import ModelConfig
from zeroexp.models.gpt import GPT
from zeroexp.models.loss import next_token_loss
from zeroexp.pipeline.runtime import layers_of

LR = 0.1
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "dim": 8,
    "layers": 3,
    "heads": 2,
    "max_seq_len": 6,
}


def gpt(seed: int = 0, *, frozen: bool = False, recompute: bool = False, **keys: Any) -> GPT:
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**{**SIZES, **keys}), recompute=recompute).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.embedding.weight.requires_grad_(not frozen)
    return model


def token_batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randint(0, 17, (5, 8, 7), generator=torch.Generator().manual_seed(1))
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


Found = tuple[list[float], dict[str, Tensor], list[str], float]


def tied(name: str, keys: dict[str, Any]) -> Found:
    # Another seed on the last rank: its copy of the tied weight starts as the first rank's. The
    # other weights are its own, so they are taken over by hand.
    own, same = gpt(rank(), **keys), gpt(0, **keys)
    with torch.no_grad():
        for (n, p), q in zip(own.named_parameters(), same.parameters(), strict=True):
            if n != "embedding.weight" or rank() == 0:
                p.copy_(q)
    pipe = Pipe(own, scheduled(name, 2, 4), next_token_loss)
    losses = pipe.train(token_batches(), LR)
    counted = [tie.name for tie in pipe.ties.ties if pipe.ties.counts_here(tie)]
    return losses, pipe.weights(), counted, float(len(pipe.ties.ties))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("1f1b", {}),
        ("1f1b", {"frozen": True}),
        ("zb_h1", {"positions": "learned", "recompute": True}),
        ("interleaved", {}),
        ("zb_v", {}),
        ("gpipe", {"tied": False}),
    ],
)
def test_the_gpt_in_a_pipeline(ranks, name, keys):
    losses, weights = plain_losses(gpt(0, **keys), token_batches(), next_token_loss, LR)
    found = ranks(2)(tied, name, keys)
    for theirs, _, _, _ in found:
        assert theirs == pytest.approx(losses, abs=1e-12)
    assert furthest(gather_weights([w for _, w, _, _ in found]), weights) <= 1e-12
    shared = keys.get("tied", True) and name != "zb_v"  # a V holds both ends on one rank
    assert [n for _, _, n, _ in found] == [["embedding.weight"] if shared else [], []]
    assert [n for *_, n in found] == [1.0 if shared else 0.0] * 2


def test_layers_in_turn_are_the_model():
    for keys in ({}, {"positions": "learned"}, {"tied": False}):
        model = gpt(**keys)
        tokens, targets = token_batches()[0]
        value: Any = tokens
        for _, layer in layers_of(model):
            value = layer(value)
        assert torch.equal(value, model(tokens))
        assert torch.equal(next_token_loss(value, targets), model(tokens, targets))


class Around(nn.Module):
    """Two weights, each used at both ends, one of them nowhere with a gradient at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        ends = [nn.Linear(4, 4, bias=False) for _ in range(4)]
        ends[2].weight, ends[3].weight = ends[1].weight, ends[0].weight
        self.ends = nn.ModuleList(ends).double()
        self.nested = nn.ModuleDict({"middle": nn.ModuleList([nn.Linear(4, 4).double()])})

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        a, b, c, d = self.ends
        middle = self.nested["middle"][0]
        return [("a", a), ("b", b), ("middle", middle), ("c", c), ("d", d)]

    def forward(self, x: Tensor) -> Tensor:
        for _, layer in self.pipeline_layers():
            x = layer(x)
        return x


def two_ties(name: str) -> tuple[list[float], dict[str, Tensor]]:
    pipe = Pipe(Around(), scheduled(name, 2, 2), by=[3, 2])
    return pipe.train(around_batches(), 0.1), pipe.weights()


def around_batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(3)
    drawn = torch.randn(5, 2, 4, 4, generator=source, dtype=torch.float64)
    return [(x, y) for x, y in drawn]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_two_ties_in_opposite_order(ranks, name):
    """PP-07: both copies bitwise equal, and equal to one process."""
    losses, weights = plain_losses(Around(), around_batches(), F.mse_loss, 0.1)
    found = ranks(2)(two_ties, name)
    assert furthest(gather_weights([w for _, w in found]), weights) <= 1e-12
    assert found[0][0] == found[1][0] == pytest.approx(losses, abs=1e-12)
