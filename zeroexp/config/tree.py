"""The whole configuration: all sections in one frozen value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from zeroexp.config import hardware
from zeroexp.config.sections import (
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    LaunchConfig,
    LoggerConfig,
    MeasureConfig,
    ModelConfig,
    MoeConfig,
    OffloadConfig,
    OptimConfig,
    PathsConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
)
from zeroexp.config.setting import Key, keys_of, section_types, setting

DEFAULT_BATCH_SIZE = 24  # sequences; comes out for 1, 2, 3, 4, 6 and 8 ranks


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that describes a run.

    Build it with :meth:`from_mapping` (checked), :func:`zeroexp.config.compose` (from a command
    line) or :func:`zeroexp.config.load` (from a file).
    """

    name: str = setting(
        "train",
        "name of the experiment. Runs with one name share a directory.",
        changes="the run directory: runs/<name>/",
        digest=False,
    )
    tag: str | None = setting(
        None,
        "short label of this run. none: made from the overrides.",
        changes="the run directory: runs/<name>/<time>-<tag>/",
        digest=False,
    )
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @classmethod
    def from_mapping(cls, partial: Mapping[str, Any] | None = None) -> Config:
        """A configuration from the keys that differ from the defaults, nested or dotted.

        ``{"zero": {"stage": 3}}``, ``{"zero.stage": 3}`` and any Mapping type are accepted.

        Raises:
            ConfigError: with every unknown key, wrong value and broken rule.
        """
        from zeroexp.config.build import build

        return build(partial or {})

    def updated(self, partial: Mapping[str, Any]) -> Config:
        """This configuration with other values for the keys in ``partial``; checked as a whole.

        Raises:
            ConfigError: as :meth:`from_mapping`.
        """
        from zeroexp.config.build import build

        return build(partial, base=self)

    def to_dict(self) -> dict[str, Any]:
        """All keys as nested dicts, lists and scalars, ready for JSON or YAML."""
        return {f.name: _as_dict(getattr(self, f.name)) for f in fields(self)}

    def get(self, path: str) -> Any:
        """The value of a dotted key. Raises KeyError when there is none."""
        node: Any = self
        for part in path.split("."):
            if not is_dataclass(node) or part not in {f.name for f in fields(node)}:
                raise KeyError(path)
            node = getattr(node, part)
        return node

    @property
    def ranks(self) -> int:
        """Processes of the run: devices x num_nodes."""
        return self.trainer.devices * self.trainer.num_nodes

    @property
    def data_ranks(self) -> int:
        """Ranks over which the data is spread: ranks = data ranks x pipeline.stages."""
        return max(1, self.ranks // self.pipeline.size)

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the state: ``zero.shard_size`` as a number."""
        size = self.zero.shard_size
        if size is None:
            return self.data_ranks
        return self.node_data_ranks if isinstance(size, str) else size

    @property
    def node_data_ranks(self) -> int:
        """Data ranks of one stage that are on one node: those of a stage are neighbours (world =
        pipe x data), so that what crosses nodes is what goes between stages."""
        return min(self.trainer.devices, self.data_ranks)

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        data = self.data
        if data.batch_size is not None:
            return data.batch_size
        if data.micro_batch_size is not None:
            return data.micro_batch_size * self.data_ranks * self.trainer.accumulate_grad_batches
        return DEFAULT_BATCH_SIZE

    @property
    def micro_batch_size(self) -> int:
        """Sequences per data rank in one forward pass; a pipeline cuts them again."""
        if self.data.micro_batch_size is not None:
            return self.data.micro_batch_size
        return self.batch_size // (self.data_ranks * self.trainer.accumulate_grad_batches)

    @property
    def num_micro_batches(self) -> int:
        """Parts in which those sequences go through the pipe; 1 without a pipeline."""
        return self.pipeline.num_micro_batches(self.micro_batch_size)

    def resolved(self) -> Config:
        """This configuration with every ``auto`` and every derived value written out for this
        machine.

        Resolving twice changes nothing. Left as they are: ``zero.shard_size: none`` (all data
        ranks, which an engine counts in its process group), ``pipeline.micro_batches: none`` (it
        divides the batch, which an engine sees when it comes), ``zero.reshard_after_forward: auto``
        (a policy, not a choice to be made here), ``launch.threads_per_rank: none`` and everything
        that means "off".
        """
        accelerator = self.trainer.accelerator
        if accelerator == "auto":
            accelerator = hardware.default_accelerator()
        return replace(
            self,
            trainer=replace(self.trainer, accelerator=accelerator),
            precision=_resolved_precision(self.precision, accelerator),
            zero=self._resolved_zero(),
            offload=self._resolved_offload(),
            pipeline=self._resolved_pipeline(),
            schedule=self._resolved_schedule(),
            model=self._resolved_model(),
            data=self._resolved_data(),
            paths=replace(self.paths, runs=_absolute(self.paths.runs)),
            checkpoint=self._resolved_checkpoint(),
        )

    def digest(self) -> str:
        """16 hex digits over every key that results or reported figures depend on, resolved for
        this machine.

        Names, paths of output, loggers and timeouts take no part: two runs with one digest compute
        the same.
        """
        tree = self.resolved().to_dict()
        values = {}
        for path, key in KEYS.items():
            if key.meta.digest:
                node: Any = tree
                for part in path.split("."):
                    node = node[part]
                values[path] = node
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _resolved_zero(self) -> ZeroConfig:
        zero = self.zero
        shard_size = self.node_data_ranks if isinstance(zero.shard_size, str) else zero.shard_size
        reduce = zero.reduce
        if reduce == "auto":
            reduce = "each" if zero.stage >= 2 else "last"
        return replace(zero, shard_size=shard_size, reduce=reduce)

    def _resolved_offload(self) -> OffloadConfig:
        offload = self.offload
        folder = offload.nvme.dir or str(Path(self.paths.runs) / "swap")
        nvme = replace(offload.nvme, dir=_absolute(folder))
        return replace(offload, optim=offload.optim_tier, params=offload.params_tier, nvme=nvme)

    def _resolved_pipeline(self) -> PipelineConfig:
        pipeline = self.pipeline
        if pipeline.schedule == "none":
            return pipeline
        return replace(pipeline, stages=pipeline.size, virtual=pipeline.num_virtual)

    def _resolved_schedule(self) -> ScheduleConfig:
        schedule = self.schedule
        needs_end = schedule.kind in KEYS["schedule.total_steps"].meta.kinds
        if needs_end and schedule.total_steps is None and self.trainer.max_steps > 0:
            return replace(schedule, total_steps=self.trainer.max_steps)
        return schedule

    def _resolved_model(self) -> ModelConfig:
        model = self.model
        if model.kind == "external":
            return model
        if model.kind == "gpt":
            model = replace(model, kv_heads=model.num_kv_heads)
        return replace(model, hidden=model.hidden_size)

    def _resolved_data(self) -> DataConfig:
        data = self.data
        batch: int | None = self.batch_size
        micro: int | None = self.micro_batch_size
        if batch != self.micro_batch_size * self.data_ranks * self.trainer.accumulate_grad_batches:
            # The default batch on ranks it does not fit, in a script that brings its own loader.
            batch, micro = data.batch_size, data.micro_batch_size
        return replace(
            data,
            path=None if data.path is None else _absolute(data.path),
            batch_size=batch,
            micro_batch_size=micro,
            seed=self.trainer.seed if data.seed is None else data.seed,
        )

    def _resolved_checkpoint(self) -> CheckpointConfig:
        resume = self.checkpoint.resume
        if resume is None or resume == "auto":
            return self.checkpoint
        return replace(self.checkpoint, resume=_absolute(resume))


def _resolved_precision(precision: PrecisionConfig, accelerator: str) -> PrecisionConfig:
    compute = precision.compute
    if compute == "auto":
        compute = hardware.default_compute(accelerator)
    wide = "fp64" if compute == "fp64" else "fp32"
    scale = precision.loss_scale
    if scale.mode == "auto":
        scale = replace(scale, mode="dynamic" if compute == "fp16" else "off")
    return replace(
        precision,
        compute=compute,
        # fp32 and fp64 parameters are their own master: no second copy exists.
        master=_default(precision.master, "fp32") if compute in ("bf16", "fp16") else "none",
        reduce=_default(precision.reduce, wide),
        accumulate=_default(precision.accumulate, wide),
        nonfinite=_default(precision.nonfinite, "skip" if compute == "fp16" else "stop"),
        loss_scale=scale,
    )


def _default(value: str, chosen: str) -> str:
    return chosen if value == "auto" else value


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _as_dict(node: Any) -> Any:
    if is_dataclass(node) and not isinstance(node, type):
        return {f.name: _as_dict(getattr(node, f.name)) for f in fields(node)}
    if isinstance(node, tuple | list):
        return [_as_dict(item) for item in node]
    if isinstance(node, dict):
        return {k: _as_dict(v) for k, v in node.items()}
    return node


def option_key(section: str) -> str:
    """The key that says what the options of a group differ in; sections without such have none."""
    return "pipeline.schedule" if section == "pipeline" else f"{section}.kind"


KEYS: dict[str, Key] = keys_of(Config)
SECTIONS: dict[str, type] = section_types(Config)
