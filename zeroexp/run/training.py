"""What a rank trains: module, data, strategy and Trainer, made from the run's configuration.
Imports lightning.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from zeroexp.config import Config
from zeroexp.config.hardware import cpu_flags
from zeroexp.data.plan import num_sequences
from zeroexp.data.sources.registry import open_source
from zeroexp.errors import ConfigError, Problem
from zeroexp.models.specs import FLOPS_FORMULA, flops_per_token, is_built_in
from zeroexp.run.directory import RunDirectory
from zeroexp.run.environment import available_cores
from zeroexp.run.machine import cpu_hertz
from zeroexp.run.measure import PeakFlops, cpu_peak, gpu_peak
from zeroexp.run.measurement import Measurement
from zeroexp.run.procfs import rss_bytes
from zeroexp.run.rank import Rank
from zeroexp.run.resume import checkpoints_in
from zeroexp.run.saving import StepCheckpoints
from zeroexp.strategies import ZeroStrategy
from zeroexp.strategies.data import TokenDataModule
from zeroexp.strategies.module import build_module


def train(
    rank: Rank, checkpoint: Path | None, environment: ClusterEnvironment | None = None
) -> None:
    """Train to the end. ``checkpoint`` is where the run continues; ``environment`` says which
    rank this is.
    """
    _quieten()
    config = Config.from_mapping(yaml.safe_load(rank.directory.config.read_text(encoding="utf-8")))
    config = config.resolved()
    if config.trainer.accelerator == "cpu" and config.launch.threads_per_rank is not None:
        torch.set_num_threads(config.launch.threads_per_rank)
    if rank.attempt:
        # Started again after a crash: go on from what this run has saved itself.
        saved = checkpoints_in(rank.directory.checkpoints)
        checkpoint = saved[-1] if saved else checkpoint
    seed_everything(config.trainer.seed, workers=True, verbose=False)
    measurement = _measurement(config, rank)
    callbacks: list[Callback] = [measurement]
    if config.checkpoint.kind == "full":
        callbacks.append(
            StepCheckpoints(
                rank.directory, config.checkpoint.every, config.checkpoint.keep, measurement.clock
            )
        )
    module = build_module(config)
    # A LightningModule that brings its own loaders reads its own data, dealt out by Lightning.
    own_data = is_overridden("train_dataloader", module, LightningModule)
    validates = is_overridden("validation_step", module, LightningModule)
    if not validates and (asked := _asked_to_validate(rank.directory)):
        print(
            f"validation is off: {config.model.target} has no validation_step, so "
            f"{', '.join(asked)} has no effect",
            flush=True,
        )
    trainer = _trainer(
        config,
        rank.directory,
        callbacks,
        environment or TorchElasticEnvironment(),
        own_data,
        validates,
    )
    if own_data:
        measurement.figures.global_batch = None  # known to its loaders only
        print("data: the loaders of the model's own LightningModule", flush=True)
    data = None if own_data else TokenDataModule(config)
    trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if checkpoint else None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def with_ranks_of_launcher() -> ClusterEnvironment:
    """Who this rank is under torchrun or Slurm; MASTER_ADDR, RANK and the like are set afterwards.

    Raises :class:`ConfigError` when nobody has started ranks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return TorchElasticEnvironment()
    if SLURMEnvironment.detect():
        found = SLURMEnvironment(auto_requeue=False)
        os.environ.update(
            MASTER_ADDR=found.main_address,
            MASTER_PORT=str(found.main_port),
            RANK=str(found.global_rank()),
            LOCAL_RANK=str(found.local_rank()),
            WORLD_SIZE=str(found.world_size()),
        )
        return found
    raise ConfigError(
        [
            Problem(
                "launch.kind",
                "external: nobody has started ranks.",
                "Start torchrun --nproc-per-node N train.py launch=external, or leave launch out",
            )
        ]
    )


def _trainer(
    config: Config,
    directory: RunDirectory,
    callbacks: list[Callback],
    environment: ClusterEnvironment,
    own_data: bool,
    validates: bool,
) -> Trainer:
    asked = config.trainer
    # Our loaders count validation batches themselves, so that they do not depend on the ranks.
    limit: int | float = asked.val_batches if own_data else 1.0
    if not (validates and asked.val_batches and (own_data or config.data.val_fraction)):
        limit = 0
    return Trainer(
        accelerator=asked.accelerator,
        devices=asked.devices,
        num_nodes=asked.num_nodes,
        strategy=cast(Strategy, ZeroStrategy(config=config)),
        plugins=[environment],
        max_steps=asked.max_steps,
        max_epochs=asked.max_epochs if asked.max_epochs is not None else -1,
        accumulate_grad_batches=asked.accumulate_grad_batches,
        gradient_clip_val=asked.gradient_clip_val or None,
        # Our loaders deal out the data themselves.
        use_distributed_sampler=own_data,
        limit_val_batches=limit,
        num_sanity_val_steps=0,
        **_validation_times(config, own_data),
        log_every_n_steps=asked.log_every,
        logger=_loggers(config, directory) or False,
        callbacks=callbacks,
        detect_anomaly=config.debug.detect_anomaly,
        default_root_dir=directory.path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def _asked_to_validate(directory: RunDirectory) -> list[str]:
    """The keys about validation that were set for this run, and not to "never"."""
    origins = yaml.safe_load(directory.origins.read_text(encoding="utf-8"))
    config = yaml.safe_load(directory.config.read_text(encoding="utf-8"))
    return [
        f"trainer.{name}={config['trainer'][name]}"
        for name in ("val_batches", "val_every")
        if origins.get(f"trainer.{name}", "default") != "default" and config["trainer"][name]
    ]


def _validation_times(config: Config, own_data: bool) -> dict[str, Any]:
    """When Lightning validates, in its words: it counts micro-batches, over all epochs."""
    asked = config.trainer
    steps = asked.val_every or _last_step(config, own_data)
    if steps is not None:
        batches = steps * asked.accumulate_grad_batches
        return {"val_check_interval": batches, "check_val_every_n_epoch": None}
    return {"check_val_every_n_epoch": asked.max_epochs}


def _last_step(config: Config, own_data: bool) -> int | None:
    """The optimizer step with which the run ends: by steps or by epochs, whichever comes first."""
    ends = [config.trainer.max_steps] if config.trainer.max_steps > 0 else []
    if config.trainer.max_epochs is not None:
        if own_data:
            return ends[0] if ends else None
        sequences = num_sequences(open_source(config).num_tokens("train"), config.data.seq_len)
        ends.append(config.trainer.max_epochs * (sequences // config.batch_size))
    return min(ends)


def _loggers(config: Config, directory: RunDirectory) -> list[Logger]:
    made: list[Logger] = []
    for kind in config.logger.kinds:
        if kind == "tensorboard":
            # Flushed often: a run that is killed should not lose the last minutes of its curves.
            made.append(
                TensorBoardLogger(directory.path, name="tensorboard", version="", flush_secs=10)
            )
        elif kind == "csv":
            made.append(CSVLogger(directory.path, name="csv", version=""))
        elif kind == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            made.append(
                WandbLogger(name=directory.path.name, project=config.name, save_dir=directory.path)
            )
        elif kind == "mlflow":
            from lightning.pytorch.loggers import MLFlowLogger

            made.append(
                MLFlowLogger(
                    experiment_name=config.name,
                    run_name=directory.path.name,
                    save_dir=str(directory.path),
                )
            )
    return made


def _measurement(config: Config, rank: Rank) -> Measurement:
    if is_built_in(config.model):
        flops = flops_per_token(config.model, config.data.seq_len, config.moe)
        rule = FLOPS_FORMULA
    else:
        flops, rule = None, "the FLOPs of a model of your own are not known"
    return Measurement(
        config,
        rank.directory,
        rank.rank,
        rss_baseline_bytes=rss_bytes(),
        flops_per_token=flops,
        flops_rule=rule,
        peak=_peak(config),
    )


def _peak(config: Config) -> PeakFlops:
    precision = config.precision.compute
    if config.trainer.accelerator == "gpu":
        return gpu_peak(torch.cuda.get_device_name(), precision, config.ranks)
    threads = torch.get_num_threads() * config.trainer.devices
    node = cpu_peak(cpu_flags(), cpu_hertz(), threads, available_cores(), precision)
    if config.trainer.num_nodes == 1 or node.value is None:
        return node
    nodes = config.trainer.num_nodes
    return PeakFlops(node.value * nodes, f"{nodes} nodes of {node.assumption}")


def _quieten() -> None:
    """Only warnings that tell the user something: what a training run prints should fit on a
    screen.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Advice of Lightning's that does not apply: the loaders shard the data themselves and read from
    # memory.
    for message in (
        r"The '\w+' does not have many workers",
        r"The number of training batches \(\d+\) is smaller than the logging interval",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"You are using `torch.load` with `weights_only",
        # Said in our own words where it matters, by _asked_to_validate and by the strategy.
        r"You passed in a `val_dataloader` but have no `validation_step`",
        r"`LightningModule.configure_optimizers` returned `None`",
    ):
        warnings.filterwarnings("ignore", message=message)
