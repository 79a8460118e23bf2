"""What every segment of one engine shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroexp.comm import World
from zeroexp.comm.pool import BufferPool
from zeroexp.ledger import Ledger
from zeroexp.placement import StatePlacement
from zeroexp.precision import Policy
from zeroexp.tiers import Border
from zeroexp.zero.buffer import SparePages
from zeroexp.zero.disk import Disk


@dataclass(frozen=True)
class Surroundings:
    """See the module; built once, by the engine."""

    world: World
    ledger: Ledger
    placement: StatePlacement
    """Of segments whose state leaves the device as far as the configuration says."""
    policy: Policy
    pool: BufferPool
    spare: SparePages
    border: Border
    """Between the device's memory and the host's."""
    device: torch.device
    bucket: int
    """Largest message of one reduction in bytes (``zero.bucket``)."""
    fraction: float = 1.0
    """Part of the optimizer state that leaves the device (``offload.fraction``)."""
    delayed: bool = False
    """Whether steps go on beside the next forward, and so need copies of all they change."""
    disk: Disk | None = None
    """Where state on the nvme tier is kept; ``None`` when there is none."""
