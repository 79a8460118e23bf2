"""The sections of a configuration, one file each: keys, defaults and what they change."""

from __future__ import annotations

from zeroexp.config.sections.checkpoint import CheckpointConfig
from zeroexp.config.sections.data import DataConfig
from zeroexp.config.sections.debug import DebugConfig
from zeroexp.config.sections.launch import LaunchConfig
from zeroexp.config.sections.logger import LoggerConfig
from zeroexp.config.sections.measure import MeasureConfig
from zeroexp.config.sections.model import ModelConfig
from zeroexp.config.sections.moe import MoeConfig
from zeroexp.config.sections.offload import NvmeConfig, OffloadConfig
from zeroexp.config.sections.optim import OptimConfig
from zeroexp.config.sections.paths import PathsConfig
from zeroexp.config.sections.pipeline import PipelineConfig
from zeroexp.config.sections.precision import LossScaleConfig, PrecisionConfig
from zeroexp.config.sections.recompute import RecomputeConfig
from zeroexp.config.sections.schedule import ScheduleConfig
from zeroexp.config.sections.trainer import TrainerConfig
from zeroexp.config.sections.zero import ZeroConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DebugConfig",
    "LaunchConfig",
    "LoggerConfig",
    "LossScaleConfig",
    "MeasureConfig",
    "ModelConfig",
    "MoeConfig",
    "NvmeConfig",
    "OffloadConfig",
    "OptimConfig",
    "PathsConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "ZeroConfig",
]
