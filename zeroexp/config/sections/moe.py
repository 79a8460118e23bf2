"""moe: feed-forward blocks of which each token uses a part."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting

_NUM_CHOICES = {"top1": 1, "top2": 2}

CHOSEN_BY_TOKENS = ("top1", "top2", "topk", "sigmoid")
"""Kinds in which a token chooses its experts."""

GATES = (*CHOSEN_BY_TOKENS, "expert_choice")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts in the blocks of the built-in GPT.

    In a model of your own, `zeroexp.moe.MoE` takes the same as arguments.
    """

    kind: str = setting(
        "none",
        "how tokens get their experts. none: dense blocks; top1, top2, topk, sigmoid: a token "
        "takes the best 1, 2 or `top_k`; expert_choice: experts take tokens, also by what comes "
        "later in the text.",
        changes="parameter count, arithmetic and the loss",
        choices=("none", *GATES),
    )
    experts: int = setting(
        8,
        "number of experts of a block. Each is an MLP of model.hidden.",
        changes="parameter count; not the work of a token",
        minimum=1,
        kinds=GATES,
    )
    top_k: int = setting(
        2,
        "experts that a token takes. For expert_choice: takes on average.",
        changes="work of a token",
        minimum=1,
        kinds=("topk", "sigmoid", "expert_choice"),
    )
    every: int = setting(
        1,
        "which blocks have experts. Every block whose number, counted from 1, this divides.",
        changes="parameter count",
        minimum=1,
        kinds=GATES,
    )
    capacity_factor: float | None = setting(
        None,
        "places of an expert as a multiple of its even share. Tokens that find none pass the block "
        "by; none: all are served (for expert_choice: 1).",
        changes="dropped tokens, and the largest batch of an expert",
        above=0,
        kinds=GATES,
    )
    eval_capacity_factor: float | None = setting(
        None,
        "capacity_factor outside of training. none: as in training.",
        changes="dropped tokens in validation",
        above=0,
        kinds=GATES,
    )
    min_capacity: int = setting(
        4,
        "places that an expert has at least, where there is a capacity factor.",
        changes="dropped tokens of small batches",
        minimum=0,
        unit="tokens",
        kinds=GATES,
    )
    priority: str = setting(
        "auto",
        "who gets a place first. position: the earlier token; choice: all first choices, then all "
        "second ones; probs: the higher score; random; auto: choice for top2, else position.",
        changes="which tokens are dropped",
        choices=("auto", "position", "choice", "probs", "random"),
        kinds=CHOSEN_BY_TOKENS,
    )
    jitter: float = setting(
        0.0,
        "noise on the input of the gate in training. It is multiplied by U(1 - jitter, 1 + "
        "jitter).",
        changes="which experts are tried",
        minimum=0,
        below=1,
        kinds=GATES,
    )
    shared: int = setting(
        0,
        "experts that every token takes besides. As one MLP of that many times model.hidden.",
        changes="parameter count and work of a token",
        minimum=0,
        kinds=GATES,
    )
    residual: bool = setting(
        False,
        "mix a dense MLP with the experts by learned weights (PR-MoE).",
        changes="parameter count and work of a token",
        kinds=GATES,
    )
    balance_loss: float = setting(
        0.01,
        "weight of the loss that evens out experts (GShard, Switch).",
        changes="what is trained for; reported apart from the loss",
        minimum=0,
        kinds=CHOSEN_BY_TOKENS,
    )
    z_loss: float = setting(
        0.0,
        "weight of the loss on large router logits (ST-MoE).",
        changes="what is trained for; reported apart from the loss",
        minimum=0,
        kinds=GATES,
    )
    sequence_loss: float = setting(
        0.0,
        "weight of balance inside every sequence (DeepSeek-V3).",
        changes="what is trained for; reported apart from the loss",
        minimum=0,
        kinds=CHOSEN_BY_TOKENS,
    )
    bias_rate: float = setting(
        0.0,
        "step of a bias that evens out experts without a loss. Use it with balance_loss=0.",
        changes="which experts are chosen",
        minimum=0,
        kinds=("top1", "topk", "sigmoid"),
    )
    expert_parallel: int = setting(
        1,
        "data ranks that share one set of experts. 1: every rank has all of them, and ZeRO shards "
        "them as it shards the rest.",
        changes="where experts lie, and the all-to-all of a pass; never the weights",
        minimum=1,
        kinds=GATES,
    )

    @property
    def num_choices(self) -> int:
        """Experts that a token takes, shared ones left out."""
        return _NUM_CHOICES.get(self.kind, self.top_k)

    @property
    def rows_per_token(self) -> float:
        """Rows that experts get for one token, shared ones left out, if all get equally many."""
        served = 1.0 if self.capacity_factor is None else self.capacity_factor
        if self.kind != "expert_choice":
            served = min(1.0, served)  # tokens choose: places that are left stay empty
        return self.num_choices * served

    @property
    def drops(self) -> bool:
        """Whether a capacity is set, in training or outside of it."""
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def in_block(self, index: int) -> bool:
        """Whether block ``index``, counted from 0, has experts."""
        return self.kind != "none" and (index + 1) % self.every == 0

    def num_blocks(self, layers: int) -> int:
        """Blocks of ``layers`` that have experts."""
        return layers // self.every if self.kind != "none" else 0

    @property
    def makes_losses(self) -> bool:
        """Whether the gates add to what is trained for."""
        by_tokens = self.kind in CHOSEN_BY_TOKENS and (self.balance_loss or self.sequence_loss)
        return bool(self.kind != "none" and (self.z_loss or by_tokens))
