"""The one table of ZeRO: which kind of state is sharded, and on which tier it lives.

Everything that differs between the stages (Rajbhandari et al., arXiv:1910.02054, section 5) is read
from here. The engine has no branch on a stage number; it asks the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Tier(str, Enum):
    """Where bytes live. ``DEVICE`` is the device that computes, also when that device is a CPU."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"


@dataclass(frozen=True)
class Placement:
    """One kind of state: cut over the shard group or held whole by every rank, and on which
    tier."""

    sharded: bool
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class StatePlacement:
    """Parameters, gradients and optimizer state of one segment."""

    params: Placement
    grads: Placement
    optim: Placement

    @property
    def separates_master(self) -> bool:
        """Whether what the optimizer steps is a copy even in the dtype that computes: on another
        tier than the parameters, or in the records of a file."""
        return self.optim.tier is not self.params.tier or self.optim.tier is Tier.NVME

    def uses(self, tier: Tier) -> bool:
        """Whether any kind of state is on ``tier``."""
        return any(kind.tier is tier for kind in (self.params, self.grads, self.optim))

    def kept_on_device(self) -> StatePlacement:
        """The same with gradients and optimizer state on the device."""
        return replace(
            self,
            grads=replace(self.grads, tier=Tier.DEVICE),
            optim=replace(self.optim, tier=Tier.DEVICE),
        )

    def whole_on_device(self) -> StatePlacement:
        """The same with parameters whole and on the device."""
        return replace(self, params=_WHOLE)


_WHOLE, _CUT = Placement(sharded=False), Placement(sharded=True)

STAGES: dict[int, StatePlacement] = {
    0: StatePlacement(params=_WHOLE, grads=_WHOLE, optim=_WHOLE),
    1: StatePlacement(params=_WHOLE, grads=_WHOLE, optim=_CUT),
    2: StatePlacement(params=_WHOLE, grads=_CUT, optim=_CUT),
    3: StatePlacement(params=_CUT, grads=_CUT, optim=_CUT),
}


def place(stage: int, *, optim: Tier = Tier.DEVICE, params: Tier = Tier.DEVICE) -> StatePlacement:
    """The placement of ``stage`` with optimizer state and parameters at home on these tiers.

    Owned gradients of stages 2 and 3 wait where the optimizer needs them: in host memory when its
    state is off the device (Ren et al., arXiv:2101.06840, section 4), on disk when nothing else of
    the model stays in memory. Gradients that every rank holds whole stay on the device.
    """
    base = STAGES[stage]
    grads = Tier.DEVICE
    if base.grads.sharded and optim is not Tier.DEVICE:
        grads = Tier.NVME if optim is params is Tier.NVME else Tier.CPU
    return StatePlacement(
        params=replace(base.params, tier=params),
        grads=replace(base.grads, tier=grads),
        optim=replace(base.optim, tier=optim),
    )


def leaving(sizes: Sequence[int], fraction: float) -> set[int]:
    """Which of the segments of ``sizes`` elements leave the device when ``fraction`` of the state
    may: the largest first, as many as fit."""
    room = fraction * sum(sizes)
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return chosen
