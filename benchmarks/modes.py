"""The systems that are compared and the settings each is run with. Pure data: imports no torch.

Every mode trains in float32 with AdamW at the same settings and no gradient clipping. torch's modes
use ``AdamW(fused=True)`` (the default on a CPU is a loop that is five times slower).
``interpreter`` says where a mode runs: ``main`` is the interpreter of the harness, ``peers`` the
environment that :mod:`benchmarks.peer_env` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Mode:
    """One row of the table. ``module`` has ``start(model, options)``, which returns a
    :class:`benchmarks.peer.Peer`; ``trains`` is False for a floor that takes no optimizer step,
    whose losses therefore say nothing about the others'."""

    name: str
    label: str
    module: str
    options: Mapping[str, object] = field(default_factory=dict)
    interpreter: str = "main"
    trains: bool = True


def _zeroexp(stage: int) -> Mode:
    return Mode(
        f"zx{stage}", f"zeroexp stage {stage}", "benchmarks.peers.zeroexp_engine", {"stage": stage}
    )


def _deepspeed(stage: int) -> Mode:
    return Mode(
        f"ds{stage}",
        f"DeepSpeed stage {stage}",
        "benchmarks.peers.deepspeed_engine",
        {"stage": stage},
        interpreter="peers",
    )


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Mode(
                "local",
                "floor: forward and backward only",
                "benchmarks.peers.local",
                trains=False,
            ),
            Mode("ddp", "torch DDP", "benchmarks.peers.ddp"),
            Mode("zro", "torch ZeroRedundancyOptimizer", "benchmarks.peers.zro"),
            Mode("fsdp", "torch FSDP2", "benchmarks.peers.fsdp", {"reshard": True}),
            Mode(
                "fsdp-noreshard",
                "torch FSDP2, kept whole after forward",
                "benchmarks.peers.fsdp",
                {"reshard": False},
            ),
            _deepspeed(0),
            _deepspeed(1),
            _deepspeed(2),
            _deepspeed(3),
            _zeroexp(0),
            _zeroexp(1),
            _zeroexp(2),
            _zeroexp(3),
            Mode(
                "zx3-noreshard",
                "zeroexp stage 3, kept whole after forward",
                "benchmarks.peers.zeroexp_engine",
                {"stage": 3, "reshard_after_forward": "false"},
            ),
        )
    }
)
