"""Rules of the built-in models and of model=external."""

from __future__ import annotations

import re

from zeroexp.config.rules.rule import Rule, differs, divisors, ratio
from zeroexp.config.value import show

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        key="model.heads",
        why="dim = heads x width of a head",
        reads=("model.heads", "model.dim", "model.kind"),
        broken=lambda c: c.model.kind == "gpt" and c.model.dim % c.model.heads != 0,
        problem=lambda c: f"{c.model.heads} does not divide dim {c.model.dim}.",
        fix=lambda c: (
            f"{c.model.dim} = heads {c.model.heads} x {ratio(c.model.dim, c.model.heads)}; "
            f"use {divisors(c.model.dim)}"
        ),
    ),
    Rule(
        key="model.heads",
        why="rotary positions turn pairs: the width of a head is even",
        reads=("model.heads", "model.dim", "model.positions", "model.kind"),
        broken=lambda c: (
            c.model.kind == "gpt"
            and c.model.positions == "rotary"
            and c.model.dim % c.model.heads == 0
            and c.model.dim // c.model.heads % 2 == 1
        ),
        problem=lambda c: f"a head of {c.model.dim // c.model.heads} cannot be turned in pairs.",
        fix=lambda c: (
            f"{c.model.dim} = heads {c.model.heads} x {c.model.dim // c.model.heads}, and rotary "
            "wants it even; change model.heads or use model.positions=learned"
        ),
    ),
    Rule(
        key="model.kv_heads",
        why="heads = kv_heads x group",
        reads=("model.kv_heads", "model.heads", "model.kind"),
        broken=lambda c: c.model.kind == "gpt" and c.model.heads % c.model.num_kv_heads != 0,
        problem=lambda c: f"{c.model.kv_heads} does not divide {c.model.heads} heads.",
        fix=lambda c: (
            f"{c.model.heads} heads = kv_heads {c.model.kv_heads} x group "
            f"{ratio(c.model.heads, c.model.num_kv_heads)}; use {divisors(c.model.heads)}"
        ),
    ),
    Rule(
        key="model.mlp_ratio",
        why="the hidden width is a whole number of at least 1",
        reads=("model.mlp_ratio", "model.dim", "model.hidden", "model.kind"),
        broken=lambda c: (
            c.model.kind != "external"
            and c.model.hidden is None
            and (not float(c.model.mlp_ratio * c.model.dim).is_integer() or c.model.hidden_size < 1)
        ),
        problem=lambda c: f"{show(c.model.mlp_ratio)} x dim {c.model.dim} is not whole.",
        fix=lambda c: (
            f"hidden = {show(c.model.mlp_ratio)} x {c.model.dim} = "
            f"{c.model.mlp_ratio * c.model.dim:.6g}; use model.hidden={max(1, c.model.hidden_size)}"
        ),
    ),
    Rule(
        key="model.mlp_ratio",
        why="hidden and mlp_ratio answer the same question",
        reads=("model.mlp_ratio", "model.hidden", "model.kind"),
        broken=lambda c: (
            c.model.hidden is not None
            and differs(c, "model.mlp_ratio")
            and c.model.hidden != c.model.mlp_ratio * c.model.dim
        ),
        problem=lambda c: f"{show(c.model.mlp_ratio)} and hidden {c.model.hidden} disagree.",
        fix=lambda c: "Keep one of model.mlp_ratio and model.hidden",
    ),
    Rule(
        key="model.max_seq_len",
        why="learned positions have a row for every position",
        reads=("model.max_seq_len", "model.positions", "data.seq_len", "model.kind"),
        broken=lambda c: (
            c.model.kind == "gpt"
            and c.model.positions == "learned"
            and c.data.seq_len > c.model.max_seq_len
        ),
        problem=lambda c: (
            f"{c.model.max_seq_len} rows are fewer than data.seq_len {c.data.seq_len}."
        ),
        fix=lambda c: f"Use model.max_seq_len={c.data.seq_len}, or model.positions=rotary",
    ),
    Rule(
        key="model.max_seq_len",
        why="rotary positions have no table",
        reads=("model.max_seq_len", "model.positions", "model.kind"),
        broken=lambda c: (
            c.model.kind == "gpt"
            and c.model.positions == "rotary"
            and differs(c, "model.max_seq_len")
        ),
        problem=lambda c: "does nothing with positions=rotary.",
        fix=lambda c: "Use model.positions=learned, or leave the key out",
    ),
    Rule(
        key="model.target",
        why="model=external is your class",
        reads=("model.target", "model.kind"),
        broken=lambda c: (
            c.model.kind == "external" and not _IMPORT_PATH.fullmatch(c.model.target or "")
        ),
        problem=lambda c: (
            "is missing." if c.model.target is None else f"{c.model.target} is not an import path."
        ),
        fix=lambda c: "Wanted package.module:Class, as in model.target=my_project.model:MyModel",
    ),
    Rule(
        key="recompute.kind",
        why="only the blocks of the built-in models recompute by configuration",
        reads=("recompute.kind", "model.kind"),
        broken=lambda c: c.recompute.kind != "none" and c.model.kind == "external",
        problem=lambda c: f"{c.recompute.kind} does nothing in a model of your own.",
        fix=lambda c: "Call torch.utils.checkpoint in your module, with recompute=none here",
    ),
)
