"""The one table of ZeRO: which kind of state is sharded, and on which tier it lives.

Everything that differs between the stages (Rajbhandari et al., arXiv:1910.02054, section 5) is read
from here. The engine has no branch on a stage number; it asks the placement.
"""

from __future__ import annotations

from dataclasses import dataclass
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


_WHOLE, _CUT = Placement(sharded=False), Placement(sharded=True)

STAGES: dict[int, StatePlacement] = {
    0: StatePlacement(params=_WHOLE, grads=_WHOLE, optim=_WHOLE),
    1: StatePlacement(params=_WHOLE, grads=_WHOLE, optim=_CUT),
    2: StatePlacement(params=_WHOLE, grads=_CUT, optim=_CUT),
    3: StatePlacement(params=_CUT, grads=_CUT, optim=_CUT),
}
