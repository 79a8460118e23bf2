"""Rules of the mixture of experts."""

from __future__ import annotations

from zeroexp.config.rules.rule import Rule, differs, divisors, whole_pipes
from zeroexp.config.tree import KEYS, Config

_ON = "moe.kind"
_PIPE = ("pipeline.schedule", "pipeline.stages")
_RANKS = ("trainer.devices", "trainer.num_nodes", *_PIPE)


def _has(c: Config) -> bool:
    return c.moe.kind != "none"


def _near(c: Config) -> str:
    """Numbers of experts around the asked one that divide over the group."""
    below = c.moe.experts // c.moe.expert_parallel * c.moe.expert_parallel
    above = below + c.moe.expert_parallel
    return f"{below} or {above}" if below else f"{above}"


def _needs_capacity(name: str) -> Rule:
    key = f"moe.{name}"
    return Rule(
        key=key,
        why="only a capacity turns tokens away",
        reads=(key, "moe.capacity_factor", "moe.eval_capacity_factor", _ON),
        broken=lambda c: c.moe.kind in KEYS[key].meta.kinds and not c.moe.drops and differs(c, key),
        problem=lambda c: "does nothing without a capacity: every token is served.",
        fix=lambda c: "Give moe.capacity_factor, or leave it out",
    )


MOE_RULES: tuple[Rule, ...] = (
    Rule(
        key="moe.kind",
        why="only the blocks of the built-in GPT get experts by configuration",
        reads=("moe.kind", "model.kind"),
        broken=lambda c: _has(c) and c.model.kind != "gpt",
        problem=lambda c: f"{c.moe.kind} does nothing with model.kind={c.model.kind}.",
        fix=lambda c: (
            "Use zeroexp.moe.MoE in your module, with moe=none here"
            if c.model.kind == "external"
            else "Use a model of kind gpt"
        ),
    ),
    Rule(
        key="moe.top_k",
        why="a token takes different experts",
        reads=("moe.top_k", "moe.experts", _ON),
        broken=lambda c: _has(c) and c.moe.num_choices > c.moe.experts,
        problem=lambda c: f"{c.moe.num_choices} of {c.moe.experts} experts.",
        fix=lambda c: (
            f"Use 1 to {c.moe.experts}, or at least moe.experts={c.moe.num_choices}"
            if c.moe.kind != "top2"
            else "moe=top2 needs at least moe.experts=2; use moe=top1"
        ),
    ),
    Rule(
        key="moe.every",
        why="a block has experts",
        reads=("moe.every", "model.layers", "model.kind", _ON),
        broken=lambda c: _has(c) and c.model.kind == "gpt" and c.moe.every > c.model.layers,
        problem=lambda c: f"no block of {c.model.layers} is number {c.moe.every}.",
        fix=lambda c: f"Use 1 to {c.model.layers}",
    ),
    _needs_capacity("min_capacity"),
    _needs_capacity("priority"),
    Rule(
        key="moe.experts",
        why="experts = expert_parallel x experts of a rank",
        reads=("moe.experts", "moe.expert_parallel", _ON),
        broken=lambda c: _has(c) and c.moe.experts % c.moe.expert_parallel != 0,
        problem=lambda c: (
            f"{c.moe.experts} do not divide over {c.moe.expert_parallel} ranks "
            "(moe.expert_parallel)."
        ),
        fix=lambda c: f"Use {_near(c)}, or moe.expert_parallel={divisors(c.moe.experts)}",
    ),
    Rule(
        key="moe.expert_parallel",
        why="data ranks = expert_parallel x ranks with the same experts",
        reads=("moe.expert_parallel", *_RANKS, _ON),
        broken=lambda c: _has(c) and whole_pipes(c) and c.data_ranks % c.moe.expert_parallel != 0,
        problem=lambda c: f"{c.moe.expert_parallel} does not divide {c.data_ranks} data ranks.",
        fix=lambda c: f"Use {divisors(c.data_ranks)}",
    ),
    Rule(
        key="moe.expert_parallel",
        why="a sharded copy of the model has all experts, or each rank whole ones",
        reads=("moe.expert_parallel", "zero.shard_size", *_RANKS, _ON),
        broken=lambda c: (
            _has(c)
            and whole_pipes(c)
            and c.moe.expert_parallel % c.shard_size != 0
            and c.shard_size % c.moe.expert_parallel != 0
        ),
        problem=lambda c: (
            f"{c.moe.expert_parallel} and zero.shard_size={c.shard_size}: neither divides the "
            "other."
        ),
        fix=lambda c: f"Use {divisors(c.shard_size)}, or a multiple of {c.shard_size}",
    ),
    Rule(
        key="moe.expert_parallel",
        why="one rank measures what layers cost, and it does not have all experts",
        reads=("moe.expert_parallel", "pipeline.cut", *_PIPE, _ON),
        broken=lambda c: (
            _has(c)
            and c.moe.expert_parallel > 1
            and c.pipeline.is_on
            and (c.pipeline.recipe is None or c.pipeline.cut == "time")
        ),
        problem=lambda c: (
            f"{c.moe.expert_parallel} with layers that are measured "
            f"({'pipeline.schedule=auto' if c.pipeline.recipe is None else 'pipeline.cut=time'})."
        ),
        fix=lambda c: "Use a named schedule with pipeline.cut=parameters or layers, or 1",
    ),
)
