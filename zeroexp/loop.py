"""The loop of DeepSpeed users, without Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeroexp.comm.ranks import with_ranks
from zeroexp.config import Config, load
from zeroexp.engine import Engine
from zeroexp.optim import build, schedule


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    scheduler: Any = None,
    loader: Any = None,
) -> tuple[Engine, Optimizer, Any, Any]:
    """The loop of DeepSpeed users without Lightning: ``engine, optimizer, loader, scheduler``.

    ``config`` is a :class:`Config`, a mapping, or the path of a YAML or JSON file. Without
    ``optimizer`` the ``optim`` section builds one; without ``scheduler`` the ``schedule`` section
    does. :meth:`Engine.step` advances the scheduler.
    """
    if isinstance(config, Mapping):
        config = with_ranks(config)
    settings = config if isinstance(config, Config) else load(config or {})
    chosen = optimizer or build(settings.optim, model.named_parameters())
    engine = Engine(model, chosen, settings)
    if scheduler is None:
        scheduler = schedule(settings.schedule, chosen, settings.trainer.max_steps)
    engine.scheduler = scheduler
    return engine, chosen, loader, scheduler
