"""What a run will need, before it starts: the planner's figures, and whether they fit this
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroexp.config import Config
from zeroexp.models.specs import is_built_in, num_params, param_specs
from zeroexp.plan import predict
from zeroexp.run.procfs import total_memory_bytes
from zeroexp.run.record import human_bytes


@dataclass(frozen=True)
class Forecast:
    """The plan of one run. ``predicted`` has the shape of result.json's ``predicted``; bytes
    throughout.

    ``needed_bytes`` is the predicted state of all ranks of one node (activations, buffers and the
    interpreter come on top), ``memory_bytes`` what this machine has for them; None where that is
    unknown.
    """

    predicted: dict[str, Any]
    num_params: int
    needed_bytes: int | None
    memory_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """False when the state alone exceeds the memory; None when one of the two is unknown."""
        if self.needed_bytes is None or self.memory_bytes is None:
            return None
        return self.needed_bytes <= self.memory_bytes

    @property
    def verdict(self) -> str:
        """One sentence on memory."""
        if self.memory_bytes is None or self.needed_bytes is None:
            return "Whether it fits is unknown: the memory of the device is not known here."
        need, have = human_bytes(self.needed_bytes), human_bytes(self.memory_bytes)
        state = f"The state of this node's ranks takes {need}"
        if not self.fits:
            return (
                f"{state}, and there are {have}. Use a higher zero stage, more devices, a smaller "
                "model, or launch.guard=off to try anyway."
            )
        return f"{state} of {have} of memory; activations and buffers come on top."


def forecast(config: Config) -> Forecast | None:
    """The plan of ``config`` (resolved), or None for a model that only its ranks can describe."""
    if not is_built_in(config.model):
        return None
    prediction = predict(config, param_specs(config.model))
    on_cpu = config.trainer.accelerator == "cpu"
    on_this_node = range(config.trainer.devices)
    states = [prediction.state_bytes[rank] for rank in on_this_node]
    tiers = ("device", "cpu") if on_cpu else ("cpu",)
    needed = sum(kind.get(tier, 0) for state in states for kind in state.values() for tier in tiers)
    return Forecast(
        predicted=prediction.to_dict(),
        num_params=num_params(config.model),
        needed_bytes=needed,
        # Of a GPU nothing is known without its runtime, which the driver does not load.
        memory_bytes=total_memory_bytes() if on_cpu else None,
    )
