"""A residual MLP over single tokens. Suffixes of tensor names: B batch, L position, C width, V
vocabulary."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.config.sections import ModelConfig
from zeroexp.models.layers import INIT_STD, Embedding, Linear
from zeroexp.models.loss import next_token_loss


class Block(nn.Module):
    """``x + down(gelu(up(x)))``."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        std = INIT_STD / math.sqrt(2 * model.layers)
        self.up = Linear(model.dim, model.hidden_size, bias=model.bias)
        self.down = Linear(model.hidden_size, model.dim, bias=model.bias, std=std)

    def forward(self, x_BLC: Tensor) -> Tensor:
        x_BLC = x_BLC + self.down(F.gelu(self.up(x_BLC)))
        return x_BLC


class _BlockLayer(nn.Module):
    """A block of a pipeline, recomputed in backward if the model asks for that."""

    def __init__(self, block: nn.Module, *, recompute: bool) -> None:
        super().__init__()
        self.block = block
        self._recompute = recompute

    def forward(self, x_BLC: Tensor) -> Tensor:
        y_BLC: Tensor
        if self._recompute and x_BLC.requires_grad:
            y_BLC = checkpoint(self.block, x_BLC, use_reentrant=False, preserve_rng_state=False)
        else:
            y_BLC = self.block(x_BLC)
        return y_BLC


class MLP(nn.Module):
    """Predicts each token from the one before it alone: all weights and no attention.

    A model whose step is dominated by communication and optimizer. Its loss cannot fall below the
    entropy of token pairs.
    """

    def __init__(self, model: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = Embedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.head = Linear(model.dim, model.vocab_size, bias=False)

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Embedding, blocks and head, for a pipeline to cut between."""
        blocks = [_BlockLayer(block, recompute=self.recompute) for block in self.blocks]
        return [
            ("embedding", self.embedding),
            *((f"blocks.{i}", layer) for i, layer in enumerate(blocks)),
            ("head", self.head),
        ]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) of ``tokens`` (B, L, int64), or with ``targets`` (B, L, int64) the mean
        loss in nats."""
        x_BLC = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute and x_BLC.requires_grad:
                x_BLC = checkpoint(block, x_BLC, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BLC = block(x_BLC)
        logits_BLV: Tensor = self.head(x_BLC)
        return logits_BLV if targets is None else next_token_loss(logits_BLV, targets)
