"""From the arguments of ``ZeroStrategy`` to a checked configuration.

A strategy decides who holds what; batches, steps, clipping and accumulation stay the Trainer's.
Keys that say something about those are refused here, since two places that both seem to decide are
how settings get lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

from zeroexp.config import Config, load
from zeroexp.config.sections import PipelineConfig
from zeroexp.errors import ConfigError, Problem

# Sections of a configuration that a strategy reads, and where the others belong.
SECTIONS = ("zero", "offload", "precision", "pipeline", "launch")
_ELSEWHERE = {
    "trainer": "Give it to the Trainer (or Fabric).",
    "optim": "Return the optimizer from configure_optimizers.",
    "schedule": "Return the scheduler from configure_optimizers.",
    "data": "The dataloaders decide.",
    "model": "The LightningModule is the model.",
    "moe": "Build zeroexp.moe.MoE layers in the model.",
    "recompute": "Call torch.utils.checkpoint in the model.",
    "checkpoint": "Add a ModelCheckpoint callback, and ckpt_path to fit.",
    "logger": "Give a logger to the Trainer.",
    "measure": "Log what you need in the LightningModule.",
}
LAUNCH_KEYS = ("timeout",)

MOST_SAMPLES = 2**20
"""Stands for a batch of unknown size that every number of micro-batches divides."""


def _foreign(mapping: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for key, value in mapping.items():
        section, _, rest = str(key).partition(".")
        if section in _ELSEWHERE:
            where = _ELSEWHERE[section]
            problems.append(Problem(str(key), "is not the strategy's to decide.", where))
        elif section == "launch":
            keys = [rest] if rest else list(value) if isinstance(value, Mapping) else []
            problems += [
                Problem(f"launch.{name}", "is for train.py.", "A strategy reads launch.timeout.")
                for name in keys
                if name not in LAUNCH_KEYS
            ]
    return problems


def _on_one_pipe(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """``mapping`` with as many ranks as its pipeline needs at least: how many there are is known
    when Lightning has started them (:func:`on_ranks`)."""
    section = mapping.get("pipeline")
    asked = dict(section) if isinstance(section, Mapping) else {}
    asked |= {key[9:]: what for key, what in mapping.items() if str(key).startswith("pipeline.")}
    stages = asked.get("stages")
    if asked.get("schedule", "none") == "none" or not isinstance(stages, (int, NoneType)):
        return mapping
    size = PipelineConfig(schedule=str(asked["schedule"]), stages=stages).size
    return {**mapping, "trainer.devices": size} if size > 1 else mapping


def _read(config: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        if problems := _foreign(config):
            raise ConfigError(problems)
        return Config.from_mapping(_on_one_pipe(config))
    path = Path(config)
    if not path.exists():
        raise FileNotFoundError(
            f"no configuration at {path.absolute()} (working directory {Path.cwd()})"
        )
    loaded: Config = load(path)
    return loaded


def build_config(
    config: Config | Mapping[str, Any] | str | PathLike[str] | None,
    zero: Mapping[str, Any],
    offload: str | Mapping[str, Any] | None,
    timeout: float | None,
    pipeline: str | Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a strategy.

    Args:
        config: a :class:`~zeroexp.config.Config`, a mapping of its keys, or the path of a YAML or
            JSON file.
        zero: keys of the ``zero`` section that were given as arguments (``None`` where they were
            not).
        offload: kind of offload, or a mapping of keys of the ``offload`` section, as an argument.
        timeout: seconds a collective may wait, as an argument.
        pipeline: the schedule, or a mapping of keys of the ``pipeline`` section, as an argument.

    Raises:
        ConfigError: every unknown key, wrong value and broken rule; also a key that is given both
            ways.
        FileNotFoundError: the path does not exist.
    """
    given = {f"zero.{key}": value for key, value in zero.items() if value is not None}
    for section, kind, value in (("offload", "kind", offload), ("pipeline", "schedule", pipeline)):
        if isinstance(value, Mapping):
            given |= {f"{section}.{key}": each for key, each in value.items()}
        elif value is not None:
            given[f"{section}.{kind}"] = value
    if timeout is not None:
        given["launch.timeout"] = timeout
    if config is None:
        return Config.from_mapping(_on_one_pipe(given))
    base = _read(config)
    twice = [key for key in given if key != "launch.timeout"]
    if twice:
        raise ConfigError(
            [
                Problem(key, "is given as an argument beside config=.", "Put it into the config.")
                for key in twice
            ]
        )
    return base.updated(given) if given else base


def on_ranks(config: Config, accelerator: str, devices: int, num_nodes: int) -> Config:
    """The configuration on the ranks that Lightning has started, with every ``auto`` resolved.

    The batch is Lightning's: one sequence per micro-batch stands here, which always comes out (in a
    pipeline as many as it has micro-batches, of unknown size).
    """
    placed: dict[str, Any] = {
        "trainer": {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}
    }
    batch_is_given = config.data.batch_size is not None or config.data.micro_batch_size is not None
    if config.ranks != devices * num_nodes or not batch_is_given:
        pipeline = config.pipeline
        parts = pipeline.micro_batches or pipeline.num_micro_batches(MOST_SAMPLES)
        placed["data"] = {"batch_size": None, "micro_batch_size": parts}
    return config.updated(placed).resolved()
