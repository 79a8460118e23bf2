"""The one table of combinations that are refused, with reason and fix."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zeroexp.config.rule import Rule
from zeroexp.config.setting import Key
from zeroexp.config.start_rules import START_RULES
from zeroexp.config.tree import DEFAULT_BATCH_SIZE, KEYS, Config
from zeroexp.config.value import show
from zeroexp.errors import Problem

_RANKS = ("trainer.devices", "trainer.num_nodes")
_BATCH = ("data.batch_size", "data.micro_batch_size", "trainer.accumulate_grad_batches", *_RANKS)
_SCALE = "precision.loss_scale"
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def divisors(n: int) -> str:
    """The divisors of ``n`` in words: ``1, 2, 3 or 6``."""
    small = [str(d) for d in range(1, n + 1) if n % d == 0]
    return small[0] if len(small) == 1 else f"{', '.join(small[:-1])} or {small[-1]}"


def _parts(c: Config) -> int:
    return c.data_ranks * c.trainer.accumulate_grad_batches


def _equation(c: Config, micro: object) -> str:
    return (
        f"micro_batch_size {micro} x data ranks {c.data_ranks} x "
        f"accumulate_grad_batches {c.trainer.accumulate_grad_batches}"
    )


def _ratio(numerator: int, denominator: int) -> str:
    return f"{numerator / denominator:.4g}"


def _whole_batches(c: Config) -> str:
    parts = _parts(c)
    below = c.batch_size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    return (
        f"{c.batch_size} = {_equation(c, _ratio(c.batch_size, parts))}; use data.batch_size={near}, "
        f"or give data.micro_batch_size"
    )


def _batch_problem(c: Config) -> str:
    given = f"{c.batch_size}" if c.data.batch_size is not None else f"{DEFAULT_BATCH_SIZE} (the default)"
    if c.batch_size < c.data_ranks:
        return f"{given} sequences are fewer than {c.data_ranks} data ranks."
    if c.trainer.accumulate_grad_batches > 1:
        return f"{given} is not divisible by {c.data_ranks} x {c.trainer.accumulate_grad_batches}."
    return f"{given} is not divisible by {c.data_ranks} data ranks."


def _scaling(c: Config) -> str:
    """The loss scale mode in effect; ``auto`` compute is never fp16."""
    mode = c.precision.loss_scale.mode
    return mode if mode != "auto" else ("dynamic" if c.precision.compute == "fp16" else "off")


def _schedule_end(c: Config) -> int | None:
    end = c.schedule.total_steps
    return end if end is not None else (c.trainer.max_steps if c.trainer.max_steps > 0 else None)


def _differs(c: Config, path: str) -> bool:
    return bool(c.get(path) != KEYS[path].default)


_TABLE = (
    Rule(
        key="data.batch_size",
        why="batch_size = micro_batch_size x data ranks x accumulate_grad_batches",
        reads=_BATCH,
        broken=lambda c: (
            c.data.batch_size is not None
            and c.data.micro_batch_size is not None
            and c.data.batch_size != c.data.micro_batch_size * _parts(c)
        ),
        problem=lambda c: f"{c.data.batch_size} is not {c.data.micro_batch_size} x {c.data_ranks} x "
        f"{c.trainer.accumulate_grad_batches}.",
        fix=lambda c: f"{(c.data.micro_batch_size or 0) * _parts(c)} = {_equation(c, c.data.micro_batch_size)}; "
        "leave data.batch_size or data.micro_batch_size out",
    ),
    Rule(
        key="data.batch_size",
        why="the micro-batch, batch_size / (data ranks x accumulate_grad_batches), is a whole number of sequences",
        reads=_BATCH,
        broken=lambda c: c.data.micro_batch_size is None and c.batch_size % _parts(c) != 0,
        problem=_batch_problem,
        fix=_whole_batches,
    ),
    Rule(
        key="zero.shard_size",
        why="only stage 3 shards parameters in groups smaller than all data ranks",
        reads=("zero.shard_size", "zero.stage"),
        broken=lambda c: c.zero.shard_size is not None and c.zero.stage != 3,
        problem=lambda c: f"{show(c.zero.shard_size)} has no meaning at stage {c.zero.stage}.",
        fix=lambda c: "Use zero=hybrid (stage 3), or leave zero.shard_size out",
    ),
    Rule(
        key="zero.shard_size",
        why="data ranks = replicate x shard",
        reads=("zero.shard_size", *_RANKS),
        broken=lambda c: isinstance(c.zero.shard_size, int) and c.data_ranks % c.zero.shard_size != 0,
        problem=lambda c: f"{c.zero.shard_size} does not divide {c.data_ranks} ranks.",
        fix=lambda c: f"{c.data_ranks} ranks = replicate {_ratio(c.data_ranks, c.shard_size)} x shard "
        f"{c.shard_size}; use {divisors(c.data_ranks)}",
    ),
    Rule(
        key="precision.master",
        why="fp16 without an fp32 master loses small updates and underflows in Adam's second moment",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "none" and c.precision.compute == "fp16",
        problem=lambda c: "fp16 cannot be stepped without an fp32 master.",
        fix=lambda c: "Use precision.master=fp32, or precision=bf16_pure",
    ),
    Rule(
        key="precision.master",
        why="training without a master copy is asked for by name, not by what a machine happens to have",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "none" and c.precision.compute == "auto",
        problem=lambda c: "none with compute=auto would depend on the machine.",
        fix=lambda c: "Use precision=bf16_pure, or name precision.compute",
    ),
    Rule(
        key="precision.master",
        why="fp64 parameters are their own master",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "fp32" and c.precision.compute == "fp64",
        problem=lambda c: "fp32 is narrower than compute=fp64.",
        fix=lambda c: "Leave precision.master out",
    ),
    Rule(
        key=f"{_SCALE}.mode",
        why="bf16 has the range of fp32 and needs no loss scale",
        reads=(f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: (
            c.precision.loss_scale.mode in ("dynamic", "static") and c.precision.compute in ("bf16", "auto")
        ),
        problem=lambda c: f"{c.precision.loss_scale.mode} is not for compute={c.precision.compute}.",
        fix=lambda c: "bf16 has the range of fp32; use precision=fp16, or leave the loss scale out",
    ),
    Rule(
        key="precision.nonfinite",
        why="a dynamic loss scale finds its value by skipping steps",
        reads=("precision.nonfinite", f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: c.precision.nonfinite == "apply" and _scaling(c) == "dynamic",
        problem=lambda c: "apply would write overflowed gradients into the weights.",
        fix=lambda c: "Use precision.nonfinite=skip, or precision.loss_scale.mode=static",
    ),
    Rule(
        key=f"{_SCALE}.floor",
        why="the first loss scale is not below the smallest",
        reads=(f"{_SCALE}.floor", f"{_SCALE}.init", f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: _scaling(c) == "dynamic" and c.precision.loss_scale.floor > c.precision.loss_scale.init,
        problem=lambda c: f"{show(c.precision.loss_scale.floor)} is above the first scale.",
        fix=lambda c: f"Use at most precision.loss_scale.init, {show(c.precision.loss_scale.init)}",
    ),
    *(
        Rule(
            key=f"{_SCALE}.{name}",
            why="keys of the loss scale need one",
            reads=(f"{_SCALE}.{name}", f"{_SCALE}.mode", "precision.compute"),
            broken=lambda c, path=f"{_SCALE}.{name}": _scaling(c) == "off" and _differs(c, path),
            problem=lambda c: f"does nothing: no loss scale with compute={c.precision.compute}."
            if c.precision.loss_scale.mode == "auto"
            else "does nothing with mode=off.",
            fix=lambda c: "Use precision=fp16, or leave the key out",
        )
        for name in ("init", "growth", "backoff", "interval", "hysteresis", "floor")
    ),
    *(
        Rule(
            key=f"{_SCALE}.{name}",
            why="a static loss scale never moves",
            reads=(f"{_SCALE}.{name}", f"{_SCALE}.mode"),
            broken=lambda c, path=f"{_SCALE}.{name}": c.precision.loss_scale.mode == "static" and _differs(c, path),
            problem=lambda c: "does nothing with mode=static.",
            fix=lambda c: "Use precision.loss_scale.mode=dynamic, or leave the key out",
        )
        for name in ("growth", "backoff", "interval", "hysteresis", "floor")
    ),
    Rule(
        key="model.heads",
        why="dim = heads x width of a head",
        reads=("model.heads", "model.dim", "model.kind"),
        broken=lambda c: c.model.kind == "gpt" and c.model.dim % c.model.heads != 0,
        problem=lambda c: f"{c.model.heads} does not divide dim {c.model.dim}.",
        fix=lambda c: f"{c.model.dim} = heads {c.model.heads} x {_ratio(c.model.dim, c.model.heads)}; "
        f"use {divisors(c.model.dim)}",
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
        fix=lambda c: f"{c.model.dim} = heads {c.model.heads} x {c.model.dim // c.model.heads}, and rotary wants it "
        "even; change model.heads or use model.positions=learned",
    ),
    Rule(
        key="model.kv_heads",
        why="heads = kv_heads x group",
        reads=("model.kv_heads", "model.heads", "model.kind"),
        broken=lambda c: c.model.kind == "gpt" and c.model.heads % c.model.num_kv_heads != 0,
        problem=lambda c: f"{c.model.kv_heads} does not divide {c.model.heads} heads.",
        fix=lambda c: f"{c.model.heads} heads = kv_heads {c.model.kv_heads} x group "
        f"{_ratio(c.model.heads, c.model.num_kv_heads)}; use {divisors(c.model.heads)}",
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
        fix=lambda c: f"hidden = {show(c.model.mlp_ratio)} x {c.model.dim} = {c.model.mlp_ratio * c.model.dim:.6g}; "
        f"use model.hidden={max(1, c.model.hidden_size)}",
    ),
    Rule(
        key="model.mlp_ratio",
        why="hidden and mlp_ratio answer the same question",
        reads=("model.mlp_ratio", "model.hidden", "model.kind"),
        broken=lambda c: (
            c.model.hidden is not None
            and _differs(c, "model.mlp_ratio")
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
            c.model.kind == "gpt" and c.model.positions == "learned" and c.data.seq_len > c.model.max_seq_len
        ),
        problem=lambda c: f"{c.model.max_seq_len} rows are fewer than data.seq_len {c.data.seq_len}.",
        fix=lambda c: f"Use model.max_seq_len={c.data.seq_len}, or model.positions=rotary",
    ),
    Rule(
        key="model.max_seq_len",
        why="rotary positions have no table",
        reads=("model.max_seq_len", "model.positions", "model.kind"),
        broken=lambda c: (
            c.model.kind == "gpt" and c.model.positions == "rotary" and _differs(c, "model.max_seq_len")
        ),
        problem=lambda c: "does nothing with positions=rotary.",
        fix=lambda c: "Use model.positions=learned, or leave the key out",
    ),
    Rule(
        key="model.vocab_size",
        why="a byte is one of 256 tokens",
        reads=("model.vocab_size", "data.kind", "model.kind"),
        broken=lambda c: (
            c.model.kind == "gpt" and c.data.kind in ("stdlib", "text") and c.model.vocab_size < 256
        ),
        problem=lambda c: f"{c.model.vocab_size} tokens cannot name 256 bytes.",
        fix=lambda c: f"data={c.data.kind} is read as bytes; use model.vocab_size=256",
    ),
    Rule(
        key="model.target",
        why="model=external is your class",
        reads=("model.target", "model.kind"),
        broken=lambda c: c.model.kind == "external" and not _IMPORT_PATH.fullmatch(c.model.target or ""),
        problem=lambda c: "is missing."
        if c.model.target is None
        else f"{c.model.target} is not an import path.",
        fix=lambda c: "Wanted package.module:Class, as in model.target=my_project.model:MyModel",
    ),
    Rule(
        key="recompute.kind",
        why="only the blocks of the built-in gpt recompute by configuration",
        reads=("recompute.kind", "model.kind"),
        broken=lambda c: c.recompute.kind != "none" and c.model.kind != "gpt",
        problem=lambda c: f"{c.recompute.kind} has no blocks in model={c.model.kind}.",
        fix=lambda c: "Use recompute=none"
        if c.model.kind == "mlp"
        else "Call torch.utils.checkpoint in your module, with recompute=none here",
    ),
    Rule(
        key="trainer.max_steps",
        why="a run ends",
        reads=("trainer.max_steps", "trainer.max_epochs"),
        broken=lambda c: c.trainer.max_steps == 0 or (c.trainer.max_steps < 0 and c.trainer.max_epochs is None),
        problem=lambda c: "0 steps train nothing." if c.trainer.max_steps == 0 else "-1 sets no end.",
        fix=lambda c: "Use at least 1" if c.trainer.max_steps == 0 else "Give trainer.max_epochs or a number of steps",
    ),
    Rule(
        key="trainer.val_every",
        why="a validation has batches",
        reads=("trainer.val_every", "trainer.val_batches"),
        broken=lambda c: c.trainer.val_every is not None and c.trainer.val_batches == 0,
        problem=lambda c: "does nothing with val_batches=0.",
        fix=lambda c: "Use trainer.val_batches=1 or more, or leave the key out",
    ),
    Rule(
        key="schedule.total_steps",
        why="a schedule that falls needs to know where it ends",
        reads=("schedule.total_steps", "schedule.kind", "trainer.max_steps"),
        broken=lambda c: (
            c.schedule.kind in KEYS["schedule.total_steps"].meta.kinds and _schedule_end(c) is None
        ),
        problem=lambda c: f"{c.schedule.kind} has no end with max_steps=-1.",
        fix=lambda c: "Give schedule.total_steps",
    ),
    Rule(
        key="schedule.warmup_steps",
        why="the warm-up ends before the schedule does",
        reads=("schedule.warmup_steps", "schedule.total_steps", "schedule.kind", "trainer.max_steps"),
        broken=lambda c: (
            c.schedule.kind in KEYS["schedule.total_steps"].meta.kinds
            and c.schedule.warmup_steps >= (_schedule_end(c) or c.schedule.warmup_steps + 1)
        ),
        problem=lambda c: f"{c.schedule.warmup_steps} leave no step of {_schedule_end(c)} for {c.schedule.kind}.",
        fix=lambda c: f"Use less than {_schedule_end(c)}",
    ),
    Rule(
        key="data.path",
        why="data=text and data=memmap read a path",
        reads=("data.path", "data.kind"),
        broken=lambda c: c.data.kind in ("text", "memmap") and c.data.path is None,
        problem=lambda c: f"is missing for data={c.data.kind}.",
        fix=lambda c: "Give the file or folder" if c.data.kind == "text" else "Give the file of token ids",
    ),
    Rule(
        key="launch.retries",
        why="ranks that were started elsewhere cannot be started again from here",
        reads=("launch.retries", "launch.kind"),
        broken=lambda c: c.launch.kind == "external" and c.launch.retries > 0,
        problem=lambda c: "does nothing with launch=external.",
        fix=lambda c: "Use torchrun's --max-restarts",
    ),
)


def _does_nothing(key: Key) -> Rule:
    """A key of one kind set for another: it would be accepted and ignored."""
    kind = f"{key.section}.kind"
    others = ", ".join(key.meta.kinds)
    return Rule(
        key=key.path,
        why=f"belongs to {kind} {others}",
        reads=(key.path, kind),
        broken=lambda c: c.get(kind) not in key.meta.kinds and _differs(c, key.path),
        problem=lambda c: f"does nothing with {kind}={c.get(kind)}.",
        fix=lambda c: f"It belongs to {others}; leave it out",
    )


RULES: tuple[Rule, ...] = (*_TABLE, *(_does_nothing(k) for k in KEYS.values() if k.meta.kinds), *START_RULES)


def broken(config: Config, *, ignore: frozenset[str] = frozenset(), start: bool = False) -> list[Problem]:
    """One problem for every broken rule, in the order of the table.

    ``ignore`` names keys, or sections, whose value is not to be trusted: rules that read them stay silent. ``start``
    adds the rules for a run that is about to start on this machine.
    """
    problems = []
    for rule in RULES:
        if (rule.start and not start) or any(_within(path, ignore) for path in rule.reads):
            continue
        if rule.broken(config):
            problem = Problem(rule.key, rule.problem(config), _stop(rule.fix(config)))
            if problem not in problems:
                problems.append(problem)
    return problems


def _within(path: str, ignore: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in ignore)


def _stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
