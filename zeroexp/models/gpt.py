"""A decoder-only transformer.

Suffixes of tensor names: B batch, L position, C width, H query heads, K key/value heads, D head
width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.errors import ModelError
from zeroexp.models.gpt_family import head_dim
from zeroexp.models.gpt_layers import BlockLayer, Embed, RotaryTables
from zeroexp.models.layers import INIT_STD, Embedding, Linear, rotary_tables, rotate
from zeroexp.models.loss import next_token_loss
from zeroexp.moe import MLP, MoE, moe_layers

NORM_EPS = 1e-5

Rotary = tuple[Tensor, Tensor]

_NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "rmsnorm": lambda m: nn.RMSNorm(m.dim, eps=NORM_EPS),
    "layernorm": lambda m: nn.LayerNorm(m.dim, eps=NORM_EPS, bias=m.bias),
}


def _residual_std(model: ModelConfig) -> float:
    return INIT_STD / math.sqrt(2 * model.layers)


class Attention(nn.Module):
    """Causal self-attention; ``kv_heads`` below ``heads`` share keys and values between groups of
    query heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = head_dim(model)
        self.grouped = model.num_kv_heads != model.heads
        self.dropout = model.dropout
        kv_dim = model.num_kv_heads * self.head_dim
        self.q = Linear(model.dim, model.dim, bias=model.bias)
        # A key bias adds the same number to all scores of a query: softmax removes it, and its
        # gradient is rounding noise.
        self.k = Linear(model.dim, kv_dim, bias=False)
        self.v = Linear(model.dim, kv_dim, bias=model.bias)
        self.out = Linear(model.dim, model.dim, bias=model.bias, std=_residual_std(model))

    def forward(self, x_BLC: Tensor, rotary: Rotary | None) -> Tensor:
        q_BHLD = self._heads(self.q(x_BLC))
        k_BKLD = self._heads(self.k(x_BLC))
        v_BKLD = self._heads(self.v(x_BLC))
        if rotary is not None:
            q_BHLD, k_BKLD = rotate(q_BHLD, *rotary), rotate(k_BKLD, *rotary)
        y_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BKLD,
            v_BKLD,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.grouped,
        )
        y_BLC: Tensor = self.out(y_BHLD.transpose(1, 2).flatten(2))
        return y_BLC

    def _heads(self, x_BLC: Tensor) -> Tensor:
        return x_BLC.view(*x_BLC.shape[:2], -1, self.head_dim).transpose(1, 2)


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(model.dim, model.hidden_size, bias=model.bias)
        self.down = Linear(model.hidden_size, model.dim, bias=model.bias, std=_residual_std(model))

    def forward(self, x_BLC: Tensor) -> Tensor:
        y_BLC: Tensor = self.down(F.gelu(self.up(x_BLC)))
        return y_BLC


class SwigluMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer, arXiv:2002.05202)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(model.dim, model.hidden_size, bias=model.bias)
        self.up = Linear(model.dim, model.hidden_size, bias=model.bias)
        self.down = Linear(model.hidden_size, model.dim, bias=model.bias, std=_residual_std(model))

    def forward(self, x_BLC: Tensor) -> Tensor:
        y_BLC: Tensor = self.down(F.silu(self.gate(x_BLC)) * self.up(x_BLC))
        return y_BLC


_MLPS: dict[str, Callable[[ModelConfig], nn.Module]] = {"gelu": GeluMLP, "swiglu": SwigluMLP}


def _sparse_mlp(model: ModelConfig, moe: MoeConfig) -> MoE:
    """Experts in place of the MLP, drawn as it is drawn."""
    mlp = _MLPS[model.activation]
    shared = replace(model, hidden=moe.shared * model.hidden_size)
    by_tokens = moe.kind != "expert_choice"
    return MoE(
        model.dim,
        MLP(
            model.hidden_size,
            model.activation,
            bias=model.bias,
            std=(INIT_STD, _residual_std(model)),
        ),
        moe.experts,
        moe.num_choices,
        gate=moe.kind,
        capacity_factor=moe.capacity_factor,
        eval_capacity_factor=moe.eval_capacity_factor,
        min_capacity=moe.min_capacity,
        priority=None if moe.priority == "auto" else moe.priority,
        jitter=moe.jitter,
        shared=mlp(shared) if moe.shared else None,
        residual=mlp(model) if moe.residual else None,
        balance_loss=moe.balance_loss if by_tokens else 0.0,
        z_loss=moe.z_loss,
        sequence_loss=moe.sequence_loss,
        bias_rate=moe.bias_rate,
        expert_parallel=moe.expert_parallel,
    )


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream; with ``moe`` the MLP is a
    mixture of experts."""

    def __init__(self, model: ModelConfig, moe: MoeConfig | None = None) -> None:
        super().__init__()
        self.attention_norm = _NORMS[model.norm](model)
        self.attention = Attention(model)
        self.mlp_norm = _NORMS[model.norm](model)
        self.mlp = _MLPS[model.activation](model) if moe is None else _sparse_mlp(model, moe)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x_BLC: Tensor, rotary: Rotary | None) -> Tensor:
        x_BLC = x_BLC + self.dropout(self.attention(self.attention_norm(x_BLC), rotary))
        x_BLC = x_BLC + self.dropout(self.mlp(self.mlp_norm(x_BLC)))
        return x_BLC


class TiedHead(nn.Module):
    """Scores every token by its embedding; draws no weights of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x_BLC: Tensor) -> Tensor:
        return F.linear(x_BLC, self.weight)


class GPT(nn.Module):
    """A GPT of ``model``'s sizes, with the experts of ``moe``; weights are drawn from torch's
    current generator.

    ``recompute``: every block keeps only its input for backward and runs again there.
    """

    def __init__(
        self, model: ModelConfig, moe: MoeConfig | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(model)
        self.recompute = recompute
        self.embedding = Embedding(model.vocab_size, model.dim)
        self.positions = (
            Embedding(model.max_seq_len, model.dim) if model.positions == "learned" else None
        )
        self.dropout = nn.Dropout(model.dropout)
        sparse = moe or MoeConfig()
        self.blocks = nn.ModuleList(
            Block(model, sparse if sparse.in_block(i) else None) for i in range(model.layers)
        )
        noisy = any(layer.draws_random for layer in moe_layers(self).values())
        self.draws_random = model.dropout > 0 or noisy
        self.norm = _NORMS[model.norm](model)
        if model.tied:
            self.head: nn.Module = TiedHead(self.embedding)
        else:
            self.head = Linear(model.dim, model.vocab_size, bias=False)

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Embedding, blocks, norm and head, for a pipeline to cut between: tokens (B, L, int64)
        in, logits (B, L, V) out."""
        tables = RotaryTables(self.head_dim) if self.positions is None else None
        blocks = [
            BlockLayer(block, tables, recompute=self.recompute, draws=self.draws_random)
            for block in self.blocks
        ]
        return [
            ("embedding", Embed(self.embedding, self.positions, self.dropout)),
            *((f"blocks.{i}", layer) for i, layer in enumerate(blocks)),
            ("norm", self.norm),
            ("head", self.head),
        ]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) of ``tokens`` (B, L, int64), or with ``targets`` (B, L, int64) the mean
        loss in nats.

        Targets of :data:`zeroexp.models.loss.IGNORED` count for nothing. Raises :class:`ModelError`
        for more tokens than there are learned positions.
        """
        length = tokens.shape[1]
        x_BLC = self.embedding(tokens)
        rotary: Rotary | None = None
        if self.positions is None:
            rotary = rotary_tables(length, self.head_dim, x_BLC.device, x_BLC.dtype)
        else:
            rows = self.positions.num_embeddings
            if length > rows:
                raise ModelError(
                    f"a sequence of {length} tokens is longer than the {rows} learned positions; "
                    "raise model.max_seq_len or lower data.seq_len"
                )
            x_BLC = x_BLC + self.positions(torch.arange(length, device=tokens.device))
        x_BLC = self.dropout(x_BLC)
        for block in self.blocks:
            if self.recompute and x_BLC.requires_grad:
                x_BLC = checkpoint(
                    block, x_BLC, rotary, use_reentrant=False, preserve_rng_state=self.draws_random
                )
            else:
                x_BLC = block(x_BLC, rotary)
        logits_BLV: Tensor = self.head(self.norm(x_BLC))
        return logits_BLV if targets is None else next_token_loss(logits_BLV, targets)
