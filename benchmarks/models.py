"""The two plain torch modules that every mode trains. They know nothing of zeroexp or of any peer.

The GPT is the textbook pre-norm one (LayerNorm, learned positions, GELU, untied head). ``blocks``
is what a system that shards by layer takes as its units, for both models, and
``GPT.pipeline_layers()`` what a pipeline cuts between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer block: (batch, length, dim) to the same shape."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, dim = x_BLD.shape
        q, k, v = (
            t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x_BLD)).split(dim, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        x_BLD = x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD))))
        return x_BLD


class GPT(nn.Module):
    """Causal language model; ``forward(tokens, targets)`` (both int64, (batch, length)) gives the
    mean cross entropy in nats."""

    def __init__(self, vocab: int, context: int, dim: int, num_layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Applied in turn they make logits (batch, length, vocab) of tokens."""
        return [
            ("embedding", Embedding(self.tokens, self.positions)),
            *((f"blocks.{index}", block) for index, block in enumerate(self.blocks)),
            ("head", nn.Sequential(self.norm, self.head)),
        ]

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD = self.tokens(tokens_BL) + self.positions(positions_L)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return next_token_loss(self.head(self.norm(x_BLD)), targets_BL)


class Embedding(nn.Module):
    """Tokens (batch, length) to (batch, length, dim), by a model's own tables."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD: Tensor = self.tokens(tokens_BL) + self.positions(positions_L)
        return x_BLD


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross entropy in nats."""
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


class MLP(nn.Module):
    """Square linear layers with ReLU; ``forward(x, y)`` (both float32, (batch, dim)) gives the mean
    squared error."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_layers))

    def forward(self, x_BD: Tensor, y_BD: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x_BD = F.relu(block(x_BD))
        out_BD: Tensor = self.blocks[-1](x_BD)
        return F.mse_loss(out_BD, y_BD)
