"""No key is dead: for each one, something outside the configuration that a change of it changes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from zeroexp.config import Composed, Config
from zeroexp.config.tree import KEYS
from zeroexp.data.loader import Loaders
from zeroexp.engine import Engine
from zeroexp.errors import ConfigError
from zeroexp.models.build import build
from zeroexp.moe import auxiliary_loss, update_biases
from zeroexp.optim.build import build as build_optimizer
from zeroexp.optim.schedules import schedule
from zeroexp.precision.scaler import LossScale
from zeroexp.run import driver, training
from zeroexp.run.directory import RunDirectory
from zeroexp.run.failure import Verdict
from zeroexp.run.forecast import forecast
from zeroexp.run.launch import Job
from zeroexp.run.measure import StepClock
from zeroexp.run.summary import opening_lines
from zeroexp.tiers import FileEngine, SwapFile
from zeroexp.zero import disk

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "model.layers": 2,
    "model.dim": 32,
    "model.heads": 2,
    "model.vocab_size": 64,
    "data.kind": "synthetic",
    "data.seq_len": 16,
    "data.batch_size": 8,
    "trainer.max_steps": 20,
    "trainer.accelerator": "cpu",
    "precision.compute": "fp32",
}


# ------------------------------------------------------------------------- what is looked at


def plan(config: Config) -> Any:
    """Bytes of state, padding and traffic of every rank, the number of parameters, and what every
    rank of a pipe does."""
    made = forecast(config)
    assert made is not None
    lists = None if made.pipeline is None else made.pipeline.schedule.lists
    return made.num_params, made.predicted, lists


def loss(config: Config) -> Any:
    """The loss of an untrained model on fixed tokens, in training and in eval."""
    model = build(config.model, config.moe, seed=config.trainer.seed)
    torch.manual_seed(0)
    tokens = torch.arange(32).reshape(2, 16) % 60
    return [model.train(mode)(tokens, (tokens + 1) % 60).item() for mode in (True, False)]


def gates(config: Config) -> Any:
    """What the gates add to that loss, and their biases after a step."""
    model = build(config.model, config.moe, seed=config.trainer.seed)
    model(torch.arange(32).reshape(2, 16) % 60)
    added = auxiliary_loss(model).item()
    update_biases(model)
    return added, {name: buffer.tolist() for name, buffer in model.named_buffers()}


def optimizer(config: Config) -> Any:
    """Class of the optimizer, its groups and how many parameters are in each."""
    model = build(config.model, seed=0)
    made = build_optimizer(config.optim, model.named_parameters())
    groups = [{**group, "params": len(group["params"])} for group in made.param_groups]
    return type(made), groups


def rates(config: Config) -> Any:
    """The learning rate of each step."""
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rule = schedule(config.schedule, made, config.trainer.max_steps)
    return [rule.lr_lambdas[0](step) for step in range(20)]


def scales(config: Config) -> Any:
    """The loss scale over good and bad steps, and how it ends."""
    asked = config.precision.loss_scale
    scaler = LossScale(asked, dynamic=True, active=True)
    found = [scaler.value]
    for overflow in [False] * 3 + [True] * 3 + [False] * 3 + [True] * 40:
        if scaler.at_floor:
            break  # the next overflow ends the run
        scaler.update(overflow)
        found.append(scaler.value)
    return found


def batches(config: Config) -> Any:
    """Tokens of the first micro-batches of rank 0, whether there is a validation, the workers."""
    loaders = Loaders(config, data_rank=0)
    train = loaders.train()
    val = loaders.val()
    seen = [batch["tokens"].tolist() for batch, _ in zip(train, range(2), strict=False)]
    rest = None if val is None else sum(batch["tokens"].shape[0] for batch in val)
    return seen, rest


def trainer(config: Config) -> Any:
    """What Lightning is told."""
    directory = RunDirectory(Path("unused"))
    made = training._trainer(config, directory, [], LightningEnvironment(), True, True)
    return (
        made.max_steps,
        made.max_epochs,
        made.accumulate_grad_batches,
        made.gradient_clip_val,
        made.limit_val_batches,
        made.val_check_interval,
        made.check_val_every_n_epoch,
        made.log_every_n_steps,
        made.num_devices,
        made.num_nodes,
        [type(logger) for logger in made.loggers],
        made._detect_anomaly,
    )


def started(config: Config) -> Any:
    """Directory (without its time), ranks, threads, retries and command of what would be started,
    or why nothing was.
    """
    jobs: list[Any] = []

    def run_job(job: Job, *_: Any, **__: Any) -> Verdict:
        place = job.directory.path
        where = (place.parents[1].name, place.parent.name, place.name[15:])
        jobs.append((where, job.ranks, job.threads, job.retries, [*job.command[3:]]))
        return Verdict("ok")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "run_job", run_job)
        start = driver.prepare(Composed(config, {}, [], {}), [])
        ended = driver.run(start, quiet=True)
    start.directory.discard()  # the next one of this second gets the same name
    return jobs, ended.status.status


def opening(config: Config) -> Any:
    """What the run says before it starts."""
    return opening_lines(config, None, RunDirectory(Path("unused")), 1)


def swap_files(config: Config) -> Any:
    """How an engine opens its swap files: the file engine, bytes of each record, checksums."""
    asked: list[Any] = []

    def file_engine(*args: Any, **keys: Any) -> FileEngine:
        asked.append((args, keys))
        return FileEngine(*args, **keys)

    def swap_file(
        files: FileEngine, path: Path, sizes: Sequence[int], *args: Any, checksum: bool
    ) -> SwapFile:
        asked.append((path.name, tuple(sizes), checksum))
        return SwapFile(files, path, sizes, *args, checksum=checksum)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "FileEngine", file_engine)
        patch.setattr(disk, "SwapFile", swap_file)
        model = torch.nn.Linear(128, 128)
        Engine(model, torch.optim.AdamW(model.parameters()), config).close()
    return asked


def message(config: Config) -> Any:
    """Nothing: what is looked at is that the value is refused, by name."""


def clock(config: Config) -> Any:
    """Steps that are timed of ten."""
    made = StepClock(config.measure.warmup_steps)
    made.start()
    for _ in range(10):
        made.end_step(1)
    return made.times().n


# --------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Changes:
    """``look`` sees another thing when the key has ``value``, on top of ``base``."""

    look: Callable[[Config], Any]
    value: Any
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asserted:
    """A test that needs processes asserts it; ``says`` stands in its source."""

    node: str
    says: str


LEFT_OUT = object()
FOUR = {"trainer.devices": 4}
STAGE3 = {**FOUR, "zero.stage": 3}
FP16 = {"precision.compute": "fp16", "precision.loss_scale.interval": 2}
SGD = {"optim.kind": "sgd"}
TOPK = {"moe.kind": "topk"}
TIGHT = {**TOPK, "moe.capacity_factor": 0.25}
CPU = {"offload.kind": "cpu"}
ON_DISK = {
    "offload.kind": "nvme_params",
    "zero.stage": 3,
    "trainer.gradient_clip_val": None,
}
COSINE = {"schedule.kind": "warmup_cosine", "schedule.warmup_steps": 2}
TOKENS = {"data.kind": "memmap", "data.path": "tokens.bin"}
PIPE = {"trainer.devices": 2, "zero.stage": 3, "pipeline.schedule": "interleaved"}
HUGE = {"model.dim": 65536, "model.layers": 100, "model.heads": 64}
ZERO = "tests/ranks/test_zero_keys.py::"
TRAIN = "tests/e2e/test_train.py::"
MODULE = "tests/unit/models/test_module.py::"

EFFECTS: dict[str, Changes | Asserted] = {
    "name": Changes(started, "other"),
    "tag": Changes(started, "other"),
    "zero.stage": Changes(plan, 3, FOUR),
    "zero.shard_size": Changes(plan, 2, STAGE3),
    "zero.unit": Changes(plan, "model", {**STAGE3, "model.vocab_size": 61}),
    "zero.prefetch": Asserted(
        ZERO + "test_prefetch_is_the_number_of_whole_units_beside_the_one_in_use", "held"
    ),
    "zero.overlap": Asserted(ZERO + "test_without_overlap_one_unit_is_whole_at_a_time", "False"),
    "zero.reshard_after_forward": Changes(plan, "false", STAGE3),
    "zero.reduce": Changes(
        plan,
        "last",
        {**FOUR, "zero.stage": 2, "zero.reduce": "each", "trainer.accumulate_grad_batches": 2},
    ),
    "zero.bucket": Asserted(
        ZERO + "test_a_reduction_is_cut_into_messages_of_the_bucket", "messages"
    ),
    "offload.kind": Changes(plan, "cpu"),
    "offload.optim": Changes(plan, "nvme"),
    "offload.params": Changes(plan, "cpu", CPU),
    "offload.fraction": Changes(plan, 0.5, CPU),
    "offload.step_in_backward": Changes(plan, "false", ON_DISK),
    "offload.delayed_update": Changes(plan, True, ON_DISK),
    "offload.chunk": Changes(swap_files, "64KiB", ON_DISK),
    "offload.nvme.dir": Changes(opening, "elsewhere", ON_DISK),
    "offload.nvme.engine": Changes(swap_files, "threads", ON_DISK),
    "offload.nvme.queue_depth": Changes(swap_files, 2, ON_DISK),
    "offload.nvme.block_size": Changes(swap_files, "64KiB", ON_DISK),
    "offload.nvme.threads": Changes(swap_files, 2, ON_DISK),
    "offload.nvme.checksum": Changes(swap_files, False, ON_DISK),
    "pipeline.schedule": Changes(plan, "1f1b", {"trainer.devices": 2}),
    "pipeline.stages": Changes(plan, 4, {**FOUR, "pipeline.schedule": "1f1b"}),
    "pipeline.micro_batches": Changes(plan, 2, PIPE),
    "pipeline.virtual": Changes(plan, 1, {**PIPE, "pipeline.schedule": "breadth_first"}),
    "pipeline.cut": Changes(plan, [1, 1, 2, 1], PIPE),
    "pipeline.whole_stages": Changes(plan, 2, PIPE),
    "pipeline.memory_limit": Changes(
        plan, "400KiB", {**PIPE, "pipeline.schedule": "auto", "pipeline.micro_batches": 4}
    ),
    "moe.kind": Changes(plan, "topk"),
    "moe.experts": Changes(plan, 4, TOPK),
    "moe.top_k": Changes(loss, 3, TOPK),
    "moe.every": Changes(plan, 2, TOPK),
    "moe.capacity_factor": Changes(loss, 0.25, TOPK),
    "moe.eval_capacity_factor": Changes(loss, 0.25, TOPK),
    "moe.min_capacity": Changes(loss, 1, TIGHT),
    "moe.priority": Changes(loss, "choice", TIGHT),
    "moe.jitter": Changes(loss, 0.5, TOPK),
    "moe.shared": Changes(plan, 1, TOPK),
    "moe.residual": Changes(plan, True, TOPK),
    "moe.balance_loss": Changes(gates, 0.5, TOPK),
    "moe.z_loss": Changes(gates, 0.5, TOPK),
    "moe.sequence_loss": Changes(gates, 0.5, TOPK),
    "moe.bias_rate": Changes(gates, 0.5, TOPK),
    "moe.expert_parallel": Changes(plan, 2, {**TOPK, "trainer.devices": 2}),
    "precision.compute": Changes(plan, "bf16", FOUR),
    "precision.master": Changes(plan, "none", {**FOUR, "precision.compute": "bf16"}),
    "precision.reduce": Changes(plan, "bf16", {**FOUR, "precision.compute": "bf16"}),
    "precision.accumulate": Changes(plan, "bf16", {**FOUR, "precision.compute": "bf16"}),
    "precision.nonfinite": Asserted(
        "tests/ranks/test_cases_norms.py::test_ds73_nonfinite_gradients_follow_the_policy", "stop"
    ),
    "precision.loss_scale.mode": Asserted(
        "tests/ranks/test_cases_loss_scale.py::test_ds26_a_static_scale_is_inert_but_skips",
        "static",
    ),
    "precision.loss_scale.init": Changes(scales, 1024.0, FP16),
    "precision.loss_scale.growth": Changes(scales, 4.0, FP16),
    "precision.loss_scale.backoff": Changes(scales, 0.25, FP16),
    "precision.loss_scale.interval": Changes(scales, 3, FP16),
    "precision.loss_scale.hysteresis": Changes(scales, 1, FP16),
    "precision.loss_scale.floor": Changes(scales, 16384.0, FP16),
    "recompute.kind": Asserted(MODULE + "test_recompute_key_reaches_the_model", "recompute.kind"),
    "optim.kind": Changes(optimizer, "lion"),
    "optim.lr": Changes(optimizer, 0.5),
    "optim.betas": Changes(optimizer, [0.5, 0.6]),
    "optim.eps": Changes(optimizer, 1e-3),
    "optim.weight_decay": Changes(optimizer, 0.5),
    "optim.momentum": Changes(optimizer, 0.5, SGD),
    "optim.decay_norm_and_bias": Changes(optimizer, True),
    "schedule.kind": Changes(rates, "linear"),
    "schedule.warmup_steps": Changes(rates, 5, COSINE),
    "schedule.total_steps": Changes(rates, 10, COSINE),
    "schedule.min_ratio": Changes(rates, 0.5, COSINE),
    "model.kind": Changes(plan, "mlp", {"model.heads": LEFT_OUT}),
    "model.vocab_size": Changes(plan, 128),
    "model.dim": Changes(plan, 64),
    "model.layers": Changes(plan, 3),
    "model.heads": Changes(loss, 4),
    "model.kv_heads": Changes(plan, 1),
    "model.mlp_ratio": Changes(plan, 2.0),
    "model.hidden": Changes(plan, 48),
    "model.norm": Changes(loss, "layernorm"),
    "model.positions": Changes(plan, "learned"),
    "model.max_seq_len": Changes(plan, 64, {"model.positions": "learned"}),
    "model.tied": Changes(plan, False),
    "model.dropout": Changes(loss, 0.5),
    "model.bias": Changes(plan, True),
    "model.activation": Changes(plan, "swiglu"),
    "model.target": Asserted(
        MODULE + "test_external_module_that_cannot_be_made_is_a_configuration_problem",
        "model.target",
    ),
    "model.kwargs": Asserted(
        MODULE + "test_external_module_that_cannot_be_made_is_a_configuration_problem",
        "model.kwargs",
    ),
    "data.kind": Changes(batches, "stdlib", {"model.vocab_size": 256}),
    "data.path": Changes(batches, "other.bin", TOKENS),
    "data.seq_len": Changes(batches, 8),
    "data.batch_size": Changes(batches, 4),
    "data.micro_batch_size": Changes(batches, 2, {"data.batch_size": None}),
    "data.workers": Asserted(
        "tests/e2e/test_train.py::test_ctrl_c_ends_a_real_run_with_all_its_processes",
        "data.workers=1",
    ),
    "data.seed": Changes(batches, 3),
    "data.val_fraction": Changes(batches, 0.0),
    "data.dtype": Changes(batches, "uint8", TOKENS),
    "trainer.accelerator": Changes(opening, "gpu"),
    "trainer.devices": Changes(started, 2),
    "trainer.num_nodes": Changes(trainer, 2),
    "trainer.max_steps": Changes(trainer, 3),
    "trainer.max_epochs": Changes(trainer, 2),
    "trainer.accumulate_grad_batches": Changes(trainer, 2),
    "trainer.gradient_clip_val": Changes(trainer, 0.5),
    "trainer.val_every": Changes(trainer, 3),
    "trainer.val_batches": Changes(trainer, 3),
    "trainer.log_every": Changes(trainer, 3),
    "trainer.seed": Changes(loss, 1),
    "launch.kind": Asserted(
        "tests/e2e/test_external.py::test_ranks_of_torchrun_share_one_directory", "launch=external"
    ),
    "launch.timeout": Asserted(
        TRAIN + "test_a_hanging_rank_ends_with_status_timeout", "launch.timeout=15"
    ),
    "launch.threads_per_rank": Changes(started, 7),
    "launch.retries": Changes(started, 2),
    "launch.guard": Changes(started, "off", HUGE),
    "measure.warmup_steps": Changes(clock, 2),
    "measure.log_every": Asserted(
        TRAIN + "test_quiet_prints_nothing_while_all_is_well", "measure.log_every=2"
    ),
    "logger.kinds": Changes(trainer, ["csv"]),
    "checkpoint.kind": Asserted(
        TRAIN + "test_a_run_leaves_everything_behind_and_what_happened_is_what_was_planned",
        "checkpoint=full",
    ),
    "checkpoint.every": Asserted(
        TRAIN + "test_a_rank_killed_in_the_middle_of_a_save_costs_that_checkpoint_only",
        "checkpoint.every=1",
    ),
    "checkpoint.keep": Asserted(
        TRAIN + "test_a_full_disk_is_the_reason_wherever_it_is_written", "checkpoint.keep=9"
    ),
    "checkpoint.resume": Changes(started, "step-00000001.ckpt"),
    "paths.runs": Changes(started, "elsewhere"),
    "debug.detect_anomaly": Changes(trainer, True),
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with two token files and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    tokens = np.arange(4096, dtype=np.uint16) % 64
    tokens.tofile("tokens.bin")
    tokens[::-1].tofile("other.bin")
    Path("step-00000001.ckpt").touch()


def test_every_key_has_an_effect() -> None:
    assert set(EFFECTS) == set(KEYS)


@pytest.mark.parametrize("key", [k for k, e in EFFECTS.items() if isinstance(e, Changes)])
def test_a_change_of_the_key_is_seen(key: str) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Changes)
    base = {name: v for name, v in {**TINY, **effect.base}.items() if v is not LEFT_OUT}
    if effect.look is message:
        with pytest.raises(ConfigError, match="arrives with"):
            Config.from_mapping({**base, key: effect.value})
        return
    before = Config.from_mapping(base).resolved()
    after = Config.from_mapping({**base, key: effect.value}).resolved()
    assert effect.look(before) == effect.look(before)  # nothing but the configuration moves it
    assert effect.look(before) != effect.look(after)


@pytest.mark.parametrize("key", [k for k, e in EFFECTS.items() if isinstance(e, Asserted)])
def test_the_test_of_the_key_exists_and_uses_it(key: str) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Asserted)
    path, _, name = effect.node.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    found = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1
    first = min([found[0].lineno, *(mark.lineno for mark in found[0].decorator_list)])
    assert effect.says in "\n".join(source.splitlines()[first - 1 : found[0].end_lineno])
