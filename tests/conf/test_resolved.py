"""What `auto` and none become, and what the digest depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroexp.config import Config, hardware
from zeroexp.config.sections.offload import OFFLOAD_TIERS
from zeroexp.config.tree import KEYS


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(hardware, "has_gpu", lambda *_: False)


def resolved(**keys: Any) -> Config:
    return Config.from_mapping({k.replace("__", "."): v for k, v in keys.items()}).resolved()


@pytest.mark.parametrize(
    ("compute", "master", "wide", "nonfinite", "scale"),
    [
        ("fp32", "none", "fp32", "stop", "off"),
        ("bf16", "fp32", "fp32", "stop", "off"),
        ("fp16", "fp32", "fp32", "skip", "dynamic"),
        ("fp64", "none", "fp64", "stop", "off"),
    ],
)
def test_precision(compute: str, master: str, wide: str, nonfinite: str, scale: str) -> None:
    precision = resolved(precision__compute=compute).precision
    assert precision.compute == compute
    assert precision.master == master
    assert (precision.reduce, precision.accumulate) == (wide, wide)
    assert precision.nonfinite == nonfinite
    assert precision.loss_scale.mode == scale


def test_precision_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved().precision.compute == "fp32"
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert resolved().precision.compute == "bf16"
    assert resolved().precision.master == "fp32"
    assert resolved(precision__compute="fp32").precision.compute == "fp32"
    monkeypatch.setattr(hardware, "has_gpu", lambda *_: True)
    assert resolved().trainer.accelerator == "gpu"


@pytest.mark.parametrize(("stage", "reduce"), [(0, "last"), (1, "last"), (2, "each"), (3, "each")])
def test_reduce_is_each_where_gradients_are_sharded(stage: int, reduce: str) -> None:
    assert resolved(zero__stage=stage).zero.reduce == reduce
    assert resolved(zero__stage=stage, zero__reduce="last").zero.reduce == "last"


def test_shards() -> None:
    node = resolved(
        zero__stage=3, zero__shard_size="node", trainer__devices=2, trainer__num_nodes=4
    )
    assert (node.zero.shard_size, node.shard_size, node.data_ranks) == (2, 2, 8)
    everyone = resolved(zero__stage=3, trainer__devices=2, trainer__num_nodes=3)
    assert (everyone.zero.shard_size, everyone.shard_size) == (None, 6)


def test_schedule_ends_with_the_run_where_it_has_an_end() -> None:
    assert resolved(schedule__kind="linear", trainer__max_steps=7).schedule.total_steps == 7
    assert resolved(schedule__kind="constant").schedule.total_steps is None


def test_model_and_data() -> None:
    gpt = resolved(model__heads=8, model__mlp_ratio=3, data__micro_batch_size=2, trainer__seed=9)
    assert (gpt.model.kv_heads, gpt.model.hidden) == (8, 384)
    assert (gpt.data.batch_size, gpt.data.micro_batch_size, gpt.data.seed) == (2, 2, 9)
    assert resolved(data__seed=4, trainer__seed=9).data.seed == 4
    assert resolved(model__kind="mlp").model.kv_heads is None


def test_paths_are_those_of_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HY-07: whoever reads the resolved configuration may have another working directory."""
    monkeypatch.chdir(tmp_path)
    config = resolved(data__kind="text", data__path="data/x.txt", checkpoint__resume="runs/a")
    monkeypatch.chdir("/")
    config = config.resolved()
    assert config.data.path == f"{tmp_path}/data/x.txt"
    assert config.paths.runs == f"{tmp_path}/runs"
    assert config.checkpoint.resume == f"{tmp_path}/runs/a"
    assert resolved(checkpoint__resume="auto").checkpoint.resume == "auto"


# the digest
# Everything that no result and no reported figure depends on.
SILENT = {
    "name",
    "tag",
    "paths.runs",
    "logger.kinds",
    "launch.kind",
    "launch.timeout",
    "launch.retries",
    "launch.guard",
    "checkpoint.kind",
    "checkpoint.every",
    "checkpoint.keep",
    "trainer.log_every",
    "trainer.val_every",
    "measure.log_every",
    "data.workers",
    "debug.detect_anomaly",
    "offload.nvme.dir",
}

PIPE = {"pipeline.schedule": "interleaved", "zero.stage": 3}
# Another value for each key, with what it needs beside it.
OTHER: dict[str, dict[str, Any]] = {
    "name": {"name": "x"},
    "tag": {"tag": "x"},
    "zero.stage": {"zero.stage": 2},
    "zero.shard_size": {"zero.shard_size": 1, "zero.stage": 3, "trainer.devices": 2},
    "zero.unit": {"zero.unit": "leaf"},
    "zero.prefetch": {"zero.prefetch": 2},
    "zero.overlap": {"zero.overlap": False},
    "zero.reshard_after_forward": {"zero.reshard_after_forward": "auto"},
    "zero.reduce": {"zero.reduce": "each"},
    "zero.bucket": {"zero.bucket": "1MiB"},
    "offload.kind": {"offload.kind": "cpu"},
    "offload.optim": {"offload.optim": "cpu"},
    "offload.params": {"offload.params": "cpu"},
    **{
        f"offload.{name}": {f"offload.{name}": value, "offload.optim": "nvme"}
        for name, value in {
            "fraction": 0.5,
            "step_in_backward": "false",
            "delayed_update": True,
            "chunk": "1MiB",
            "nvme.dir": "x",
            "nvme.engine": "threads",
            "nvme.queue_depth": 8,
            "nvme.block_size": "1MiB",
            "nvme.threads": 8,
            "nvme.checksum": False,
        }.items()
    },
    "precision.compute": {"precision.compute": "bf16"},
    "precision.master": {"precision.master": "none", "precision.compute": "bf16"},
    "precision.reduce": {"precision.reduce": "bf16"},
    "precision.accumulate": {"precision.accumulate": "fp64"},
    "precision.nonfinite": {"precision.nonfinite": "skip"},
    **{
        f"precision.loss_scale.{name}": {
            f"precision.loss_scale.{name}": value,
            "precision.compute": "fp16",
        }
        for name, value in {
            "mode": "static",
            "init": 8.0,
            "growth": 4.0,
            "backoff": 0.25,
            "interval": 5,
            "hysteresis": 1,
            "floor": 2.0,
        }.items()
    },
    **{
        f"pipeline.{name}": {f"pipeline.{name}": value, "trainer.devices": 4, **PIPE}
        for name, value in {
            "stages": 4,
            "micro_batches": 4,
            "virtual": 3,
            "cut": "layers",
            "whole_stages": 2,
        }.items()
    },
    "pipeline.schedule": {"pipeline.schedule": "1f1b", "trainer.devices": 2},
    "pipeline.memory_limit": {
        "pipeline.memory_limit": "1MiB",
        "pipeline.schedule": "auto",
        "trainer.devices": 2,
    },
    "moe.kind": {"moe.kind": "top1"},
    "moe.expert_parallel": {
        "moe.expert_parallel": 2,
        "moe.kind": "topk",
        "trainer.devices": 2,
        "data.batch_size": 8,
    },
    **{
        f"moe.{name}": {
            f"moe.{name}": value,
            "moe.kind": "topk",
            **({"moe.capacity_factor": 1.0} if name in ("min_capacity", "priority") else {}),
        }
        for name, value in {
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
            "balance_loss": 0.0,
            "z_loss": 0.1,
            "sequence_loss": 0.1,
            "bias_rate": 0.1,
        }.items()
    },
    "recompute.kind": {"recompute.kind": "full"},
    "optim.kind": {"optim.kind": "adam"},
    "optim.lr": {"optim.lr": 1.0},
    "optim.betas": {"optim.betas": [0.5, 0.5]},
    "optim.eps": {"optim.eps": 1.0},
    "optim.weight_decay": {"optim.weight_decay": 0.5},
    "optim.momentum": {"optim.momentum": 0.5, "optim.kind": "sgd"},
    "optim.decay_norm_and_bias": {"optim.decay_norm_and_bias": True},
    "schedule.kind": {"schedule.kind": "inverse_sqrt"},
    "schedule.warmup_steps": {"schedule.warmup_steps": 3},
    "schedule.total_steps": {"schedule.total_steps": 7, "schedule.kind": "linear"},
    "schedule.min_ratio": {"schedule.min_ratio": 0.5, "schedule.kind": "linear"},
    "model.kind": {"model.kind": "mlp"},
    "model.vocab_size": {"model.vocab_size": 300},
    "model.dim": {"model.dim": 64},
    "model.layers": {"model.layers": 2},
    "model.heads": {"model.heads": 2},
    "model.kv_heads": {"model.kv_heads": 1},
    "model.mlp_ratio": {"model.mlp_ratio": 2.0},
    "model.hidden": {"model.hidden": 64},
    "model.norm": {"model.norm": "layernorm"},
    "model.positions": {"model.positions": "learned"},
    "model.max_seq_len": {"model.max_seq_len": 512, "model.positions": "learned"},
    "model.tied": {"model.tied": False},
    "model.dropout": {"model.dropout": 0.1},
    "model.bias": {"model.bias": True},
    "model.activation": {"model.activation": "swiglu"},
    "model.target": {"model.target": "a.b:D", "model.kind": "external"},
    "model.kwargs": {"model.kwargs.a": 1, "model.kind": "external", "model.target": "a.b:C"},
    "data.kind": {"data.kind": "synthetic"},
    "data.path": {"data.path": "b", "data.kind": "text"},
    "data.seq_len": {"data.seq_len": 64},
    "data.batch_size": {"data.batch_size": 8},
    "data.micro_batch_size": {"data.micro_batch_size": 3},
    "data.workers": {"data.workers": 2},
    "data.seed": {"data.seed": 7},
    "data.val_fraction": {"data.val_fraction": 0.5},
    "data.dtype": {"data.dtype": "int32", "data.kind": "memmap", "data.path": "a"},
    "trainer.accelerator": {"trainer.accelerator": "gpu"},
    "trainer.devices": {"trainer.devices": 2},
    "trainer.num_nodes": {"trainer.num_nodes": 2},
    "trainer.max_steps": {"trainer.max_steps": 7},
    "trainer.max_epochs": {"trainer.max_epochs": 1},
    "trainer.accumulate_grad_batches": {"trainer.accumulate_grad_batches": 2},
    "trainer.gradient_clip_val": {"trainer.gradient_clip_val": None},
    "trainer.val_every": {"trainer.val_every": 5},
    "trainer.val_batches": {"trainer.val_batches": 5},
    "trainer.log_every": {"trainer.log_every": 5},
    "trainer.seed": {"trainer.seed": 5},
    "launch.kind": {"launch.kind": "external"},
    "launch.timeout": {"launch.timeout": 5},
    "launch.threads_per_rank": {"launch.threads_per_rank": 5},
    "launch.retries": {"launch.retries": 5},
    "launch.guard": {"launch.guard": "off"},
    "measure.warmup_steps": {"measure.warmup_steps": 1},
    "measure.log_every": {"measure.log_every": 5},
    "logger.kinds": {"logger.kinds": ["csv"]},
    "checkpoint.kind": {"checkpoint.kind": "full"},
    "checkpoint.every": {"checkpoint.every": 5, "checkpoint.kind": "full"},
    "checkpoint.keep": {"checkpoint.keep": 5, "checkpoint.kind": "full"},
    "checkpoint.resume": {"checkpoint.resume": "x"},
    "paths.runs": {"paths.runs": "x"},
    "debug.detect_anomaly": {"debug.detect_anomaly": True},
}
# These have one value only until their capability arrives.
ONLY_ONE: set[str] = set()


def test_every_key_has_another_value_here() -> None:
    assert set(OTHER) | ONLY_ONE == set(KEYS)


@pytest.mark.parametrize("key", sorted(OTHER))
def test_the_digest_changes_with_what_results_depend_on_and_with_nothing_else(key: str) -> None:
    partial = OTHER[key]
    changed = Config.from_mapping(partial)
    neighbours = {k: v for k, v in partial.items() if not k.startswith(key)}
    if key == "model.target":
        neighbours["model.target"] = "a.b:C"
    if key == "data.path":
        neighbours["data.path"] = "a"
    before = Config.from_mapping(neighbours)
    assert changed != before
    assert (changed.digest() == before.digest()) == (key in SILENT)


def test_tiers_and_the_folder_of_swap_files_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, (optim, params) in OFFLOAD_TIERS.items():
        found = Config.from_mapping({"offload": kind}).resolved()
        assert (found.offload.optim, found.offload.params) == (optim, params)
        assert found.offload.nvme.dir == f"{tmp_path}/runs/swap"
        assert Config.from_mapping(found.to_dict()).resolved() == found
    one = Config.from_mapping({"offload.params": "nvme", "offload.nvme.dir": "here"}).resolved()
    assert one.offload.nvme.dir == f"{tmp_path}/here"


def test_two_ways_to_say_the_same_have_one_digest() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"precision.compute": "fp32"},
        {"data.batch_size": 24},
        {"data.micro_batch_size": 24},
        {"model.hidden": 512, "model.kv_heads": 4},
        {"zero.reduce": "last", "trainer.accelerator": "cpu"},
        {"data.seed": 0},
    ]
    assert len({Config.from_mapping(way).digest() for way in ways}) == 1


def test_a_digest_is_short_and_the_same_in_every_process() -> None:
    import subprocess
    import sys

    keys = {"precision.compute": "fp32", "trainer.accelerator": "cpu"}
    code = f"from zeroexp.config import Config; print(Config.from_mapping({keys}).digest())"
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert out[0] == out[1]
    assert len(out[0]) == 16 and int(out[0], 16) >= 0
