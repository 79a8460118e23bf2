"""What a run will need, before it starts: the planner's figures, and whether they fit this
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroexp.config import Config
from zeroexp.folder import free_bytes
from zeroexp.models.specs import (
    is_built_in,
    layer_shapes,
    num_active_params,
    num_params,
    param_specs,
)
from zeroexp.plan import predict
from zeroexp.plan.pipeline import PipelinePlan
from zeroexp.run.procfs import total_memory_bytes
from zeroexp.run.record import human_bytes


@dataclass(frozen=True)
class Forecast:
    """The plan of one run. ``predicted`` has the shape of result.json's ``predicted``; bytes
    throughout.

    ``num_active_params`` leaves out the experts that a token does not take.

    ``needed_bytes`` is the predicted state in memory of all ranks of one node (activations, buffers
    and the interpreter come on top), ``memory_bytes`` what this machine has for them; None where
    that is unknown. ``disk_bytes`` is the most that these ranks have in swap files below ``swap``
    at once, ``disk_free_bytes`` what is free there. ``offloaded`` is the part of the optimizer
    state that leaves the device, ``pipeline`` what is planned of a pipeline.
    """

    predicted: dict[str, Any]
    num_params: int
    needed_bytes: int | None
    memory_bytes: int | None
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    swap: str | None = None
    offloaded: float = 0.0
    num_active_params: int | None = None
    pipeline: PipelinePlan | None = None

    @property
    def size(self) -> str:
        """``820,352 parameters``, and how many of them a token uses where it does not use all."""
        words = f"{self.num_params:,} parameters"
        if self.num_active_params in (None, self.num_params):
            return words
        return f"{words} ({self.num_active_params:,} for one token)"

    @property
    def fits(self) -> bool | None:
        """False when the state alone exceeds the memory or the disk; None when a size that decides
        it is unknown."""
        answers = (self.fits_memory, self.fits_disk)
        if False in answers:
            return False
        return None if None in answers else True

    @property
    def fits_memory(self) -> bool | None:
        if self.needed_bytes is None or self.memory_bytes is None:
            return None
        return self.needed_bytes <= self.memory_bytes

    @property
    def fits_disk(self) -> bool | None:
        if not self.disk_bytes:
            return True
        return None if self.disk_free_bytes is None else self.disk_bytes <= self.disk_free_bytes

    @property
    def verdict(self) -> str:
        """A sentence on memory and, where there are swap files, one on the disk; what does not fit
        comes first."""
        sentences = [self._memory_verdict, self._disk_verdict]
        if self.fits_disk is False and self.fits_memory is not False:
            sentences.reverse()
        return " ".join(filter(None, sentences))

    @property
    def _memory_verdict(self) -> str:
        if self.memory_bytes is None or self.needed_bytes is None:
            return "Whether it fits is unknown: the memory of the device is not known here."
        need, have = human_bytes(self.needed_bytes), human_bytes(self.memory_bytes)
        state = f"The state of this node's ranks takes {need}"
        if not self.fits_memory:
            return (
                f"{state}, and there are {have}. Use a higher zero stage, offload=nvme_params, "
                "more devices, a smaller model, or launch.guard=off to try anyway."
            )
        return f"{state} of {have} of memory; activations and buffers come on top."

    @property
    def _disk_verdict(self) -> str:
        if not self.disk_bytes:
            return ""
        need = f"Swap files take {human_bytes(self.disk_bytes)}"
        if self.disk_free_bytes is None:
            return f"{need} in {self.swap}; how much is free there is not known."
        have = human_bytes(self.disk_free_bytes)
        if self.fits_disk:
            return f"{need} of {have} that are free for {self.swap}."
        return (
            f"{need}, and {have} are free for {self.swap}. Use another offload.nvme.dir, "
            "offload=cpu, a smaller model, or launch.guard=off to try anyway."
        )


def forecast(config: Config) -> Forecast | None:
    """The plan of ``config`` (resolved), or None for a model that only its ranks can describe."""
    if not is_built_in(config.model):
        return None
    recompute = config.recompute.kind == "full"
    shapes = layer_shapes(config.model, config.moe, recompute=recompute)
    prediction = predict(config, param_specs(config.model, config.moe), shapes)
    on_cpu = config.trainer.accelerator == "cpu"
    on_this_node = range(config.trainer.devices)
    states = [prediction.state_bytes[rank] for rank in on_this_node]

    def held(*tiers: str) -> int:
        kinds = [kind for state in states for kind in state.values()]
        return sum(kind.get(tier, 0) for kind in kinds for tier in tiers)

    # The engine makes all of its files before the first one of a model that was born on disk goes.
    twice = sum(state["params"]["nvme"] for state in states) if config.zero.stage == 3 else 0
    swap = config.offload.nvme.dir if config.offload.uses_files else None
    return Forecast(
        predicted=prediction.to_dict(),
        num_params=num_params(config.model, config.moe),
        num_active_params=num_active_params(config.model, config.moe),
        needed_bytes=held("device", "cpu") if on_cpu else held("cpu"),
        # Of a GPU nothing is known without its runtime, which the driver does not load.
        memory_bytes=total_memory_bytes() if on_cpu else None,
        disk_bytes=held("nvme") + twice,
        disk_free_bytes=None if swap is None else free_bytes(Path(swap)),
        swap=swap,
        offloaded=prediction.offloaded,
        pipeline=prediction.pipeline,
    )
