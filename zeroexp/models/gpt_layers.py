"""The GPT as layers that a pipeline can cut between (see :mod:`zeroexp.pipeline.runtime.split`).

Between blocks only the residual stream (B, L, C) crosses. The rotary tables are computed where they
are used: they follow from the length, and sending them would cost more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.errors import ModelError
from zeroexp.models.layers import rotary_tables

Rotary = tuple[Tensor, Tensor]


class Embed(nn.Module):
    """Tokens (B, L, int64) to the residual stream."""

    def __init__(
        self, embedding: nn.Embedding, positions: nn.Embedding | None, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Raises :class:`ModelError` for more tokens than there are learned positions."""
        x_BLC: Tensor = self.embedding(tokens)
        if self.positions is not None:
            length, rows = tokens.shape[1], self.positions.num_embeddings
            if length > rows:
                raise ModelError(
                    f"a sequence of {length} tokens is longer than the {rows} learned positions; "
                    "raise model.max_seq_len or lower data.seq_len"
                )
            x_BLC = x_BLC + self.positions(torch.arange(length, device=tokens.device))
        x_BLC = self.dropout(x_BLC)
        return x_BLC


class RotaryTables:
    """Cosine and sine for the last length asked for: the blocks of a stage share them."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._key: tuple[int, torch.device, torch.dtype, bool] | None = None
        self._tables: Rotary | None = None

    def at(self, x_BLC: Tensor) -> Rotary:
        # Tables made in inference mode are no good for training.
        key = (x_BLC.shape[1], x_BLC.device, x_BLC.dtype, torch.is_inference_mode_enabled())
        if self._tables is None or key != self._key:
            self._key = key
            self._tables = rotary_tables(key[0], self._head_dim, x_BLC.device, x_BLC.dtype)
        return self._tables


class BlockLayer(nn.Module):
    """A block with its rotary tables, recomputed in backward if the model asks for that."""

    def __init__(
        self, block: nn.Module, rotary: RotaryTables | None, *, recompute: bool, draws: bool
    ) -> None:
        super().__init__()
        self.block = block
        self._rotary = rotary
        self._recompute = recompute
        self._draws = draws

    def forward(self, x_BLC: Tensor) -> Tensor:
        rotary = None if self._rotary is None else self._rotary.at(x_BLC)
        if self._recompute and x_BLC.requires_grad:
            y_BLC: Tensor = checkpoint(
                self.block, x_BLC, rotary, use_reentrant=False, preserve_rng_state=self._draws
            )
        else:
            y_BLC = self.block(x_BLC, rotary)
        return y_BLC
