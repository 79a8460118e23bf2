"""model: what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroexp.config.setting import setting

_BUILT_IN = ("gpt", "mlp")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A built-in GPT or MLP, or a LightningModule of your own."""

    kind: str = setting(
        "gpt",
        "model family. gpt and mlp are built in; external imports `target`.",
        changes="the model",
        choices=("gpt", "mlp", "external"),
    )
    vocab_size: int = setting(
        256,
        "number of different tokens. data=stdlib and data=text are bytes: 256.",
        changes="rows of the embedding and of the head",
        minimum=2,
        kinds=_BUILT_IN,
    )
    dim: int = setting(
        128,
        "width of the residual stream. For mlp: width of input and output.",
        changes="parameter count, about with its square",
        minimum=1,
        kinds=_BUILT_IN,
    )
    layers: int = setting(
        4,
        "number of blocks.",
        changes="parameter count and depth",
        minimum=1,
        kinds=_BUILT_IN,
    )
    heads: int = setting(
        4,
        "number of attention heads. Must divide dim.",
        changes="the width of a head: dim / heads",
        minimum=1,
        kinds=("gpt",),
    )
    kv_heads: int | None = setting(
        None,
        "number of key and value heads. Must divide heads; none: as many as heads; fewer is "
        "grouped-query attention.",
        changes="the size of the key and value projections",
        minimum=1,
        kinds=("gpt",),
    )
    mlp_ratio: float = setting(
        4.0,
        "hidden width of a block's MLP as a multiple of dim. Used where `hidden` is none; must "
        "come out whole.",
        changes="parameter count of the MLPs",
        above=0,
        kinds=_BUILT_IN,
    )
    hidden: int | None = setting(
        None,
        "hidden width of a block's MLP. none: mlp_ratio x dim.",
        changes="parameter count of the MLPs",
        minimum=1,
        kinds=_BUILT_IN,
    )
    norm: str = setting(
        "rmsnorm",
        "normalisation. rmsnorm has a weight; layernorm a weight and, with model.bias, a bias.",
        changes="parameters and arithmetic of every norm",
        choices=("rmsnorm", "layernorm"),
        kinds=("gpt",),
    )
    positions: str = setting(
        "rotary",
        "how positions enter. rotary turns queries and keys; learned adds a table of max_seq_len "
        "rows.",
        changes="parameters and arithmetic of attention",
        choices=("rotary", "learned"),
        kinds=("gpt",),
    )
    max_seq_len: int = setting(
        1024,
        "longest sequence the model can read. Rows of the table of learned positions.",
        changes="the size of the position table",
        minimum=1,
        unit="tokens",
        kinds=("gpt",),
    )
    tied: bool = setting(
        True,
        "share the head with the embedding.",
        changes="parameter count (vocab_size x dim) and the gradient of the embedding",
        kinds=("gpt",),
    )
    dropout: float = setting(
        0.0,
        "probability of dropping an activation in training.",
        changes="the training loss; 0 draws no random numbers",
        minimum=0,
        below=1,
        kinds=("gpt",),
    )
    bias: bool = setting(
        False,
        "give linear layers and layernorms a bias.",
        changes="parameter count",
        kinds=_BUILT_IN,
    )
    activation: str = setting(
        "gelu",
        "activation of the MLPs. swiglu has a third matrix.",
        changes="arithmetic, and the parameter count with swiglu",
        choices=("gelu", "swiglu"),
        kinds=("gpt",),
    )
    target: str | None = setting(
        None,
        "import path of your LightningModule, `package.module:Class`.",
        changes="the model",
        kinds=("external",),
    )
    kwargs: dict[str, Any] = setting(  # noqa: RUF009 - a field with a default factory
        dict,
        "arguments of `target`. Free keys: model.kwargs.depth=3.",
        changes="what `target` is called with",
        kinds=("external",),
        hashed=False,
    )

    @property
    def hidden_size(self) -> int:
        """Hidden width of a block's MLP: ``hidden``, or ``mlp_ratio * dim``."""
        return self.hidden if self.hidden is not None else round(self.mlp_ratio * self.dim)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads: ``kv_heads``, or as many as ``heads``."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def num_pipeline_layers(self) -> int | None:
        """Layers that a pipeline can cut between: the blocks, and what is before and after them.
        None for a model that only its ranks know."""
        around = {"gpt": 3, "mlp": 2}  # embedding, norm of the GPT, head
        return self.layers + around[self.kind] if self.kind in around else None
