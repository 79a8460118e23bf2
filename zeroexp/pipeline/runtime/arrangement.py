"""The schedule of a pipe and the cut of its model: as asked for, or found for what layers cost.

Costs are measured, and no two measurements are alike: one rank measures and chooses, the others
take what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroexp.config.sections.pipeline import AUTO, PipelineConfig
from zeroexp.errors import ConfigError, ModelError, Problem
from zeroexp.pipeline.choose import choose
from zeroexp.pipeline.cut import Cut, Layer, cut
from zeroexp.pipeline.runtime.measure import layer_costs
from zeroexp.pipeline.runtime.split import NamedLayer, layer_sizes
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules import make_schedule
from zeroexp.zero.companion import Forward, Section, companions, sections


@dataclass(frozen=True)
class Arrangement:
    """Compute actions only are in ``schedule``. ``reason``: why it was chosen and what was not, if
    it was left open."""

    schedule: Schedule
    where: Cut
    reason: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How layers are measured: on ``sample``, a micro-batch's input (None: there is none), inside
    ``context()``, on ``device``. ``narrow``: bytes of an element in training over those of the
    module's own."""

    sample: Any
    context: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    narrow: float = 1.0


def arrange(
    asked: PipelineConfig, micro_batches: int, layers: Sequence[NamedLayer], sampling: Sampling
) -> Arrangement:
    """What ``asked`` makes of ``layers``, the same on every rank.

    With ``schedule=auto`` or ``cut=time`` rank 0 measures (collective over the default process
    group). Raises :class:`ConfigError` for what does not fit and where a sample is missing,
    :class:`ModelError` on every rank where the layers do not run on it.
    """
    if asked.schedule != AUTO and asked.cut != "time":
        name = "1f1b" if asked.schedule == "none" else asked.schedule
        schedule = make_schedule(name, asked.size, micro_batches, asked.num_virtual)
        return Arrangement(schedule, cut(layer_sizes(layers), schedule.num_stages, asked.cut))
    if any(section.meets_others for section in _sections(layers)):  # who do not measure
        raise ModelError(
            "rank 0 measures what layers cost, and some of these need other data-parallel ranks "
            "(experts that lie there): name a schedule, and cut by parameters or layers"
        )
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = [_found(asked, micro_batches, layers, sampling)]
        except ConfigError as error:
            found = [list(error.problems)]
        except Exception as error:
            found = [f"rank 0 could not measure the layers: {type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0, device=sampling.device)
    if isinstance(found[0], str):
        raise ModelError(found[0])
    if isinstance(found[0], list):
        raise ConfigError(found[0])
    assert isinstance(found[0], Arrangement)  # for the type checker
    return found[0]


def _found(
    asked: PipelineConfig, micro_batches: int, layers: Sequence[NamedLayer], sampling: Sampling
) -> Arrangement:
    if sampling.sample is None:
        key, value = ("schedule", AUTO) if asked.schedule == AUTO else ("cut", "time")
        problem = Problem(
            f"pipeline.{key}",
            f"{value} needs the costs of the layers, and there is no input to measure them with.",
            "Give PipeEngine(..., sample=the input of one micro-batch) (a LightningModule: "
            "example_input_array), or name a schedule and cut by parameters",
        )
        raise ConfigError([problem])
    costs = _costs(layers, sampling)
    if asked.schedule != AUTO:
        schedule = make_schedule(asked.schedule, asked.size, micro_batches, asked.num_virtual)
        return Arrangement(schedule, cut(costs, schedule.num_stages, asked.cut))
    choice = choose(
        costs,
        asked.size,
        micro_batches,
        memory=asked.memory_limit or _free_bytes(sampling.device),
        by=asked.cut,
        split_backward=not any(_cannot_split(layer) for _, layer in layers),
        max_virtual=asked.num_virtual,
    )
    return Arrangement(choice.schedule, choice.won.cut, str(choice))


def _costs(layers: Sequence[NamedLayer], sampling: Sampling) -> list[Layer]:
    with ExitStack() as trial:
        for section in _sections(layers):
            trial.enter_context(section.forward(Forward.TRIAL))
        trial.enter_context(sampling.context())
        trial.enter_context(torch.enable_grad())
        measured = layer_costs(layers, sampling.sample)
    return [
        replace(
            layer,
            activations=layer.activations * sampling.narrow,
            output=layer.output * sampling.narrow,
        )
        for layer in measured
    ]


def _sections(layers: Sequence[NamedLayer]) -> list[Section]:
    modules = [layer for _, layer in layers]
    return sections(companions(nn.ModuleList(modules)), modules)


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _cannot_split(layer: nn.Module) -> bool:
    return any(m._backward_hooks and not m._is_full_backward_hook for m in layer.modules())
