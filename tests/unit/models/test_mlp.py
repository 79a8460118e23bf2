"""The MLP against the same arithmetic written out."""

from __future__ import annotations

import math

import torch

from zeroexp.config.sections import ModelConfig
from zeroexp.models.build import build


def test_logits_equal_the_arithmetic_written_out() -> None:
    model = ModelConfig(kind="mlp", vocab_size=7, dim=5, hidden=6, layers=2, bias=True)
    module = build(model, seed=0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    w = {name: p.tolist() for name, p in module.named_parameters()}

    def linear(name: str, x: list[float]) -> list[float]:
        bias = w.get(f"{name}.bias", [0.0] * len(w[f"{name}.weight"]))
        rows = zip(w[f"{name}.weight"], bias, strict=True)
        return [sum(a * b for a, b in zip(row, x, strict=True)) + c for row, c in rows]

    tokens = torch.tensor([[3, 1, 6]])
    logits = module(tokens)
    for i, token in enumerate([3, 1, 6]):
        x = w["embedding.weight"][token]
        for block in ("blocks.0", "blocks.1"):
            up = [0.5 * u * (1 + math.erf(u / math.sqrt(2))) for u in linear(f"{block}.up", x)]
            x = [a + b for a, b in zip(x, linear(f"{block}.down", up), strict=True)]
        expected = torch.tensor(linear("head", x), dtype=torch.float64)
        torch.testing.assert_close(logits[0, i], expected, rtol=1e-12, atol=1e-12)


def test_recompute_changes_no_bit() -> None:
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    results = []
    for recompute in (False, True):
        module = build(ModelConfig(kind="mlp", dim=16, layers=3), seed=0, recompute=recompute)
        loss = module(tokens, tokens)
        loss.backward()
        results.append([loss] + [p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
