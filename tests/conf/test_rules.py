"""The table of rules: each has a configuration that breaks it and one nearby that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroexp.config import Config, compose
from zeroexp.config.build import assemble, coerced, flatten
from zeroexp.config.rules import RULES, START
from zeroexp.errors import ConfigError

FP16 = {"precision.compute": "fp16"}
UNCLIPPED = {"trainer.gradient_clip_val": None}
STEPPED = {
    "zero.stage": 3,
    "offload.kind": "nvme",
    "offload.step_in_backward": True,
    **UNCLIPPED,
}
EXTERNAL = {"model.kind": "external", "model.target": "a.b:C"}

F1B1 = {"pipeline.schedule": "1f1b", "trainer.devices": 2}
INTERLEAVED = {**F1B1, "pipeline.schedule": "interleaved"}

GPT = {"model.kind": "gpt", "model.target": None}
MOE_KEYS: dict[str, Any] = {
    "experts": 4,
    "top_k": 3,
    "every": 2,
    "capacity_factor": 2.0,
    "eval_capacity_factor": 2.0,
    "min_capacity": 1,
    "priority": "probs",
    "jitter": 0.1,
    "shared": 1,
    "residual": True,
    "balance_loss": 0.5,
    "z_loss": 0.1,
    "sequence_loss": 0.1,
    "bias_rate": 0.1,
}

# What breaks, the key that is reported, words of the message, and what mends it.
CASES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"data.batch_size": 16, "data.micro_batch_size": 2, "trainer.devices": 2},
        "data.batch_size",
        "16 is not 2 x 2 x 1",
        {"data.batch_size": 4},
    ),
    (
        {"data.batch_size": 7, "trainer.devices": 2},
        "data.batch_size",
        "7 is not divisible by 2",
        {"data.batch_size": 8},
    ),
    (
        {"zero.shard_size": 2, "trainer.devices": 2, "zero.stage": 2},
        "zero.shard_size",
        "no meaning at stage 2",
        {"zero.stage": 3},
    ),
    (
        {"zero.shard_size": 4, "zero.stage": 3, "trainer.devices": 6},
        "zero.shard_size",
        "6 ranks = replicate 1.5 x shard 4; use 1, 2, 3 or 6",
        {"zero.shard_size": 3},
    ),
    (
        {"precision.master": "none", **FP16},
        "precision.master",
        "fp16",
        {"precision.master": "fp32"},
    ),
    ({"precision.master": "none"}, "precision.master", "bf16_pure", {"precision.compute": "bf16"}),
    (
        {"precision.master": "fp32", "precision.compute": "fp64"},
        "precision.master",
        "narrower",
        {"precision.master": "auto"},
    ),
    (
        {"precision.compute": "bf16", "precision.loss_scale.mode": "dynamic"},
        "precision.loss_scale.mode",
        "bf16 has the range of fp32",
        FP16,
    ),
    (
        {"precision.nonfinite": "apply", **FP16},
        "precision.nonfinite",
        "overflowed gradients",
        {"precision.nonfinite": "skip"},
    ),
    (
        {"precision.loss_scale.floor": 8.0, "precision.loss_scale.init": 4.0, **FP16},
        "precision.loss_scale.floor",
        "8 is above the first scale",
        {"precision.loss_scale.floor": 4.0},
    ),
    *(
        (
            {f"precision.loss_scale.{name}": value},
            f"precision.loss_scale.{name}",
            "does nothing: no loss scale with compute=auto",
            FP16,
        )
        for name, value in {
            "init": 8.0,
            "growth": 4.0,
            "backoff": 0.25,
            "interval": 5,
            "hysteresis": 1,
            "floor": 2.0,
        }.items()
    ),
    *(
        (
            {f"precision.loss_scale.{name}": value, "precision.loss_scale.mode": "static", **FP16},
            f"precision.loss_scale.{name}",
            "does nothing with mode=static",
            {"precision.loss_scale.mode": "dynamic"},
        )
        for name, value in {
            "growth": 4.0,
            "backoff": 0.25,
            "interval": 5,
            "hysteresis": 1,
            "floor": 2.0,
        }.items()
    ),
    # Tiers.
    (
        {"offload.kind": "nvme", "offload.optim": "cpu"},
        "offload.kind",
        "nvme does nothing: the optimizer state is said to be on cpu, the parameters on device",
        {"offload.kind": "none"},
    ),
    (
        {"offload.kind": "cpu_params", "offload.optim": "device", "offload.params": "nvme"},
        "offload.kind",
        "Use offload=none",
        {"offload.params": "auto"},
    ),
    (
        {"offload.kind": "nvme", "offload.nvme.engine": "threads", "offload.nvme.queue_depth": 8},
        "offload.nvme.queue_depth",
        "does nothing with offload.nvme.engine=threads",
        {"offload.nvme.engine": "auto"},
    ),
    (
        {"offload.kind": "nvme", "offload.nvme.engine": "io_uring", "offload.nvme.threads": 8},
        "offload.nvme.threads",
        "does nothing with offload.nvme.engine=io_uring",
        {"offload.nvme.engine": "threads"},
    ),
    (
        {"offload.kind": "nvme", "offload.nvme.block_size": 5000},
        "offload.nvme.block_size",
        "5000 is not a multiple of 4KiB. Use offload.nvme.block_size=8KiB",
        {"offload.nvme.block_size": 8192},
    ),
    (
        {"offload.kind": "cpu", "offload.chunk": 100_000},
        "offload.chunk",
        "100000 is not a multiple of 4KiB. Use offload.chunk=100KiB",
        {"offload.chunk": "100KiB"},
    ),
    *(
        (
            {f"offload.{name}": value, "offload.params": "nvme"},
            f"offload.{name}",
            "does nothing: the optimizer state stays on the device",
            {"offload.optim": "cpu", "zero.stage": 3, **UNCLIPPED},
        )
        for name, value in {
            "fraction": 0.5,
            "delayed_update": True,
            "step_in_backward": True,
        }.items()
    ),
    (
        {**STEPPED, "trainer.gradient_clip_val": 0.5},
        "offload.step_in_backward",
        "clipping to 0.5 needs all gradients. Use trainer.gradient_clip_val=none",
        UNCLIPPED,
    ),
    (
        {**STEPPED, **FP16},
        "offload.step_in_backward",
        "precision.loss_scale.mode needs all gradients",
        {"precision.compute": "bf16"},
    ),
    (
        {**STEPPED, "precision.loss_scale.mode": "static", "precision.compute": "fp32"},
        "offload.step_in_backward",
        "precision.loss_scale.mode needs all gradients",
        {"precision.loss_scale.mode": "off"},
    ),
    (
        {**STEPPED, "precision.nonfinite": "skip"},
        "offload.step_in_backward",
        "precision.nonfinite needs all gradients",
        {"precision.nonfinite": "stop"},
    ),
    (
        {**STEPPED, "zero.stage": 0},
        "offload.step_in_backward",
        "true cannot be at stage 0. Use zero=stage1, 2 or 3 over all data ranks",
        {"zero.stage": 3},
    ),
    (
        {**STEPPED, "zero.shard_size": 2, "trainer.devices": 4},
        "offload.step_in_backward",
        "true cannot be with 2 replicas of the state",
        {"zero.shard_size": 4},
    ),
    (
        {**STEPPED, "offload.delayed_update": True},
        "offload.step_in_backward",
        "together with offload.delayed_update",
        {"offload.step_in_backward": "auto"},
    ),
    ({"model.heads": 3}, "model.heads", "128 = heads 3 x 42.67", {"model.heads": 8}),
    ({"model.dim": 12}, "model.heads", "a head of 3 cannot be turned", {"model.dim": 16}),
    (
        {"model.kv_heads": 3},
        "model.kv_heads",
        "4 heads = kv_heads 3 x group 1.333",
        {"model.kv_heads": 2},
    ),
    (
        {"model.mlp_ratio": 2.01},
        "model.mlp_ratio",
        "hidden = 2.01 x 128 = 257.28; use model.hidden=257",
        {"model.mlp_ratio": 2.5},
    ),
    (
        {"model.mlp_ratio": 2.0, "model.hidden": 100},
        "model.mlp_ratio",
        "hidden 100 disagree",
        {"model.hidden": 256},
    ),
    (
        {"model.positions": "learned", "data.seq_len": 2048},
        "model.max_seq_len",
        "1024 rows are fewer than data.seq_len 2048",
        {"model.max_seq_len": 2048},
    ),
    (
        {"model.max_seq_len": 64},
        "model.max_seq_len",
        "positions=rotary",
        {"model.positions": "learned", "data.seq_len": 64},
    ),
    ({"model.kind": "external"}, "model.target", "is missing", {"model.target": "a.b:C"}),
    (
        {"model.kind": "external", "model.target": "a.b.C"},
        "model.target",
        "a.b.C is not an import path. Wanted package.module:Class",
        {"model.target": "a.b:C"},
    ),
    (
        {"recompute.kind": "full", **EXTERNAL},
        "recompute.kind",
        "torch.utils.checkpoint",
        {"recompute.kind": "none"},
    ),
    (
        {"trainer.max_steps": 0},
        "trainer.max_steps",
        "0 steps train nothing",
        {"trainer.max_steps": 1},
    ),
    ({"trainer.max_steps": -1}, "trainer.max_steps", "sets no end", {"trainer.max_epochs": 1}),
    (
        {"trainer.val_every": 5, "trainer.val_batches": 0},
        "trainer.val_every",
        "val_batches=0",
        {"trainer.val_batches": 1},
    ),
    (
        {"trainer.val_every": 5, "data.val_fraction": 0.0},
        "trainer.val_every",
        "val_fraction=0",
        {"data.val_fraction": 0.1},
    ),
    (
        {"schedule.kind": "linear", "trainer.max_steps": -1, "trainer.max_epochs": 2},
        "schedule.total_steps",
        "linear has no end",
        {"schedule.total_steps": 10},
    ),
    (
        {"schedule.kind": "warmup_cosine", "schedule.warmup_steps": 100},
        "schedule.warmup_steps",
        "100 leave no step of 100",
        {"schedule.warmup_steps": 99},
    ),
    (
        {"schedule.kind": "one_cycle", "schedule.warmup_steps": 51},
        "schedule.warmup_steps",
        "51 up and 51 down do not fit into 100 steps. Use at most 50",
        {"schedule.warmup_steps": 50},
    ),
    ({"data.kind": "text"}, "data.path", "is missing for data=text", {"data.path": "a"}),
    ({"data.kind": "memmap"}, "data.path", "is missing for data=memmap", {"data.path": "a"}),
    (
        {"launch.kind": "external", "launch.retries": 1},
        "launch.retries",
        "--max-restarts",
        {"launch.retries": 0},
    ),
    # Keys of another kind of their section.
    (
        {"optim.kind": "sgd", "optim.betas": [0.5, 0.5]},
        "optim.betas",
        "It belongs to adamw, adam, lion",
        {"optim.kind": "lion"},
    ),
    (
        {"optim.kind": "lion", "optim.eps": 1.0},
        "optim.eps",
        "does nothing with optim.kind=lion",
        {"optim.kind": "adagrad"},
    ),
    (
        {"optim.momentum": 0.9},
        "optim.momentum",
        "does nothing with optim.kind=adamw",
        {"optim.kind": "sgd"},
    ),
    (
        {"schedule.total_steps": 9},
        "schedule.total_steps",
        "schedule.kind=constant",
        {"schedule.kind": "linear"},
    ),
    (
        {"schedule.min_ratio": 0.1},
        "schedule.min_ratio",
        "schedule.kind=constant",
        {"schedule.kind": "inverse_sqrt"},
    ),
    *(
        (
            {key: value, **EXTERNAL},
            key,
            "does nothing with model.kind=external",
            {"model.kind": "mlp", "model.target": None},
        )
        for key, value in {
            "model.vocab_size": 300,
            "model.dim": 64,
            "model.layers": 2,
            "model.mlp_ratio": 2.0,
            "model.hidden": 64,
            "model.bias": True,
        }.items()
    ),
    *(
        (
            {key: value, "model.kind": "mlp"},
            key,
            "does nothing with model.kind=mlp",
            {"model.kind": "gpt"},
        )
        for key, value in {
            "model.heads": 2,
            "model.kv_heads": 1,
            "model.norm": "layernorm",
            "model.positions": "learned",
            "model.tied": False,
            "model.dropout": 0.1,
            "model.activation": "swiglu",
        }.items()
    ),
    (
        {"model.max_seq_len": 256, "model.kind": "mlp"},
        "model.max_seq_len",
        "does nothing with model.kind=mlp",
        {"model.kind": "gpt", "model.positions": "learned"},
    ),
    (
        {"model.target": "a.b:C"},
        "model.target",
        "does nothing with model.kind=gpt",
        {"model.kind": "external"},
    ),
    ({"model.kwargs.a": 1}, "model.kwargs", "does nothing with model.kind=gpt", EXTERNAL),
    ({"moe.kind": "top1", "model.kind": "mlp"}, "moe.kind", "a model of kind gpt", GPT),
    ({"moe.kind": "top1", **EXTERNAL}, "moe.kind", "zeroexp.moe.MoE in your module", GPT),
    (
        {"moe.kind": "topk", "moe.top_k": 5, "moe.experts": 4},
        "moe.top_k",
        "5 of 4 experts. Use 1 to 4, or at least moe.experts=5",
        {"moe.experts": 5},
    ),
    ({"moe.kind": "top2", "moe.experts": 1}, "moe.top_k", "use moe=top1", {"moe.kind": "top1"}),
    (
        {"moe.kind": "top2", "moe.every": 5, "model.layers": 4},
        "moe.every",
        "no block of 4 is number 5. Use 1 to 4",
        {"moe.every": 4},
    ),
    *(
        (
            {"moe.kind": "topk", f"moe.{name}": value},
            f"moe.{name}",
            "without a capacity",
            {"moe.eval_capacity_factor": 2.0},
        )
        for name, value in {"min_capacity": 8, "priority": "probs"}.items()
    ),
    (
        {
            "moe.kind": "top2",
            "moe.experts": 6,
            "moe.expert_parallel": 3,
            "trainer.devices": 6,
            "data.batch_size": 6,
            "zero": {"stage": 3, "shard_size": 2},
        },
        "moe.expert_parallel",
        "3 and zero.shard_size=2: neither divides the other. Use 1 or 2, or a multiple of 2",
        {"moe.expert_parallel": 2},
    ),
    *(
        (
            {f"moe.{name}": value},
            f"moe.{name}",
            "does nothing with moe.kind=none",
            {"moe.kind": "topk", "moe.capacity_factor": 1.5},
        )
        for name, value in MOE_KEYS.items()
    ),
    (
        {"moe.expert_parallel": 2},
        "moe.expert_parallel",
        "moe.kind=none",
        {"moe.expert_parallel": 1},
    ),
    *(
        (
            {f"moe.{name}": value, "moe.kind": kind},
            f"moe.{name}",
            f"does nothing with moe.kind={kind}",
            {"moe.kind": "topk", "moe.capacity_factor": 1.5},
        )
        for kind, name, value in (
            ("top2", "top_k", 3),
            ("top2", "bias_rate", 0.1),
            ("expert_choice", "balance_loss", 0.1),
            ("expert_choice", "sequence_loss", 0.1),
            ("expert_choice", "bias_rate", 0.1),
            ("expert_choice", "priority", "probs"),
        )
    ),
    (
        {"pipeline.stages": 2, "trainer.devices": 2},
        "pipeline.stages",
        "2 without a schedule. Use pipeline=1f1b",
        {"pipeline.schedule": "1f1b"},
    ),
    (
        {**F1B1, "pipeline.stages": 4, "trainer.devices": 6},
        "pipeline.stages",
        "4 does not divide 6 ranks. 6 ranks = replicate 1 x shard 1.5 x pipe 4; use 1, 2, 3 or 6",
        {"pipeline.stages": 3},
    ),
    (
        {**F1B1, "trainer.devices": 12, "zero.stage": 3, "zero.shard_size": 4},
        "zero.shard_size",
        "4 does not divide 6 data ranks. 12 ranks = replicate 1.5 x shard 4 x pipe 2; use 1, 2, 3",
        {"zero.shard_size": 3},
    ),
    (
        {**F1B1, "pipeline.virtual": 2},
        "pipeline.virtual",
        "2 stages per rank do not fit 1f1b. Use pipeline.virtual=1",
        {"pipeline.schedule": "interleaved"},
    ),
    (
        {**INTERLEAVED, "pipeline.micro_batches": 3},
        "pipeline.micro_batches",
        "3 is not divisible by 2 ranks, as interleaved with 2 stages per rank needs. Use 2 or 4",
        {"pipeline.micro_batches": 4},
    ),
    (
        {**F1B1, "data.batch_size": 24, "pipeline.micro_batches": 5},
        "pipeline.micro_batches",
        "5 parts of 24 sequences are not equal. Use 4 or 6, or data.batch_size=20 or 25",
        {"pipeline.micro_batches": 6},
    ),
    (
        # 4 ranks, 2 of them data ranks: 2 sequences are one more for each
        {**F1B1, "trainer.devices": 4, "data.micro_batch_size": 3, "pipeline.micro_batches": 2},
        "pipeline.micro_batches",
        "2 parts of 3 sequences are not equal. Use 1 or 3, or data.micro_batch_size=2 or 4",
        {"data.micro_batch_size": 4},
    ),
    (
        {**INTERLEAVED, "data.batch_size": 9},
        "data.batch_size",
        "9 sequences per data rank make no number of micro-batches that interleaved takes. "
        "Use data.batch_size=8 or 10",
        {"data.batch_size": 10},
    ),
    (
        {**INTERLEAVED, "pipeline.whole_stages": 2},
        "pipeline.whole_stages",
        "does nothing at zero.stage=1",
        {"zero.stage": 3},
    ),
    (
        {**INTERLEAVED, "pipeline.whole_stages": 3, "zero.stage": 3},
        "pipeline.whole_stages",
        "3 of 2 stages per rank. Use at most pipeline.virtual, 2",
        {"pipeline.virtual": 3},
    ),
    (
        {**F1B1, "zero.stage": 3, "zero.prefetch": 2},
        "zero.prefetch",
        "2 does nothing in a pipeline. Leave it out",
        {"zero.prefetch": 1},
    ),
    (
        {**F1B1, "zero.stage": 3, "zero.reshard_after_forward": "false"},
        "zero.reshard_after_forward",
        "false does nothing in a pipeline. Leave it out",
        {"zero.reshard_after_forward": "true"},
    ),
    (
        {
            **F1B1,
            "pipeline.stages": 2,
            "pipeline.cut": "time",
            "trainer.devices": 4,
            "moe.kind": "top2",
            "moe.expert_parallel": 2,
        },
        "moe.expert_parallel",
        "2 with layers that are measured (pipeline.cut=time). Use a named schedule with "
        "pipeline.cut=parameters",
        {"pipeline.cut": "parameters"},
    ),
    *(
        (
            {f"pipeline.{name}": value},
            f"pipeline.{name}",
            "does nothing with pipeline.schedule=none",
            mend,
        )
        for name, value, mend in (
            ("micro_batches", 8, F1B1),
            ("virtual", 2, INTERLEAVED),
            ("cut", "layers", F1B1),
            ("whole_stages", 2, {**INTERLEAVED, "zero.stage": 3}),
            ("memory_limit", "1GiB", {**F1B1, "pipeline.schedule": "auto"}),
        )
    ),
    ({"data.path": "a"}, "data.path", "does nothing with data.kind=stdlib", {"data.kind": "text"}),
    (
        {"data.dtype": "int32", "data.kind": "text", "data.path": "a"},
        "data.dtype",
        "belongs to memmap",
        {"data.kind": "memmap"},
    ),
    (
        {"checkpoint.every": 5},
        "checkpoint.every",
        "checkpoint.kind=none",
        {"checkpoint.kind": "full"},
    ),
    (
        {"checkpoint.keep": 5},
        "checkpoint.keep",
        "checkpoint.kind=none",
        {"checkpoint.kind": "full"},
    ),
]


def name_of(case: tuple[dict[str, Any], str, str, dict[str, Any]]) -> str:
    return ",".join(f"{k}={v}" for k, v in case[0].items())


@pytest.mark.parametrize(("broken", "key", "words", "mend"), CASES, ids=map(name_of, CASES))
def test_a_combination_that_cannot_run_is_refused_and_its_neighbour_is_not(
    broken: dict[str, Any], key: str, words: str, mend: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(broken)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in f"{problem.problem} {problem.fix}"
    Config.from_mapping({**broken, **mend})


# What a command line refuses for a default: asserted in test_compose.py and below,
# as is what breaks several rules.
DEFAULTS: list[dict[str, Any]] = [
    {"moe.kind": "top2", "moe.experts": 3, "moe.expert_parallel": 2},
    {"trainer.devices": 5},
    {**F1B1, "trainer.devices": 1},
    {**F1B1, "pipeline.micro_batches": 5},
    {**INTERLEAVED, "trainer.devices": 16},
    # Embedding, four blocks, norm and head are 7 layers.
    {**INTERLEAVED, "trainer.devices": 4, "pipeline.stages": 4},
    {**F1B1, "pipeline.cut": [3, 3]},
    {"zero.stage": 3, "offload.kind": "nvme", "offload.step_in_backward": True},
]


def unchecked(partial: dict[str, Any]) -> Config:
    leaves, problems = flatten(partial)
    values, more = coerced(leaves)
    assert not problems + more
    return assemble(values, Config())


def test_every_rule_has_a_case() -> None:
    configs = [unchecked(case[0]) for case in CASES] + [unchecked(c) for c in DEFAULTS]
    missing = [
        (rule.key, rule.why)
        for rule in RULES
        if rule.scope != START and not any(rule.broken(config) for config in configs)
    ]
    assert missing == []


def test_no_rule_is_broken_by_the_defaults() -> None:
    assert [rule.why for rule in RULES if rule.scope != START and rule.broken(Config())] == []


def test_every_rule_reads_the_keys_it_names() -> None:
    from zeroexp.config.tree import KEYS

    assert [path for rule in RULES for path in (*rule.reads, rule.key) if path not in KEYS] == []


def test_experts_and_ranks_that_do_not_divide_over_a_group() -> None:
    """Issue 5: experts not divisible by the group, a group that does not divide the ranks."""
    keys = {"moe.kind": "top2", "moe.experts": 6, "moe.expert_parallel": 4, "trainer.devices": 6}
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(keys)
    found = [f"{p.key} {p.problem} {p.fix}" for p in caught.value.problems]
    assert found[0] == (
        "moe.experts 6 do not divide over 4 ranks (moe.expert_parallel). Use 4 or 8, or "
        "moe.expert_parallel=1, 2, 3 or 6."
    )
    assert found[1] == "moe.expert_parallel 4 does not divide 6 data ranks. Use 1, 2, 3 or 6."
    for bad in ({"moe.capacity_factor": 0}, {"moe.capacity_factor": -1.0}):
        with pytest.raises(ConfigError, match="capacity_factor"):
            Config.from_mapping({"moe.kind": "top2", **bad})


# rules of a run that starts on this machine
def refused(argv: list[str]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose(argv, environ={})
    compose(argv, environ={}, start=False)  # a plan is made for another machine
    return {p.key: f"{p.problem} {p.fix}" for p in caught.value.problems}


def test_a_missing_data_path_is_named_absolute_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = refused(["data=text", "data.path=corpus/a.txt"])
    assert "corpus/a.txt does not exist" in found["data.path"]
    assert f"{tmp_path}/corpus/a.txt from {tmp_path}" in found["data.path"]


def test_an_empty_data_file(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    found = refused(["data=memmap", f"data.path={tmp_path}/empty.bin"])
    assert "empty.bin is empty" in found["data.path"]


def test_data_that_exists_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    compose(["data=text", f"data.path={tmp_path}"], environ={})


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    found = refused([f"checkpoint.resume={tmp_path}/nowhere"])
    assert "does not exist" in found["checkpoint.resume"]
    compose([f"checkpoint.resume={tmp_path}"], environ={})
    compose(["checkpoint.resume=auto"], environ={})


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = refused(["trainer=gpu"])
    assert "no NVIDIA device is visible" in found["trainer.accelerator"]


def test_several_nodes_cannot_be_started_from_one() -> None:
    found = refused(["trainer.num_nodes=2"])
    assert "torchrun --nnodes 2" in found["trainer.num_nodes"]


def test_a_logger_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a)
    )
    found = refused(["logger=wandb"])
    assert found["logger.kinds"] == "wandb is not installed. pip install 'zeroexp[wandb]'."
