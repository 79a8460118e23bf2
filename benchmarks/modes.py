"""The systems that are compared and the settings each is run with. Pure data: imports no torch.

Every mode trains in float32 with AdamW at the same settings and, where its label does not say
otherwise, no gradient clipping. torch's modes use ``AdamW(fused=True)`` (the default on a CPU is a
loop that is five times slower), DeepSpeed's offloaded ones its own CPU Adam, which it insists on.
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
    whose losses therefore say nothing about the others'. A mode that uses a ``disk`` gets a folder
    there as the option ``folder``."""

    name: str
    label: str
    module: str
    options: Mapping[str, object] = field(default_factory=dict)
    interpreter: str = "main"
    trains: bool = True
    disk: bool = False


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


def _offloaded(kind: str, label: str, **options: object) -> Mode:
    name = f"zx3-{kind.replace('_', '-')}"
    return Mode(
        f"{name}-clipped" if "clip" in options else name,
        f"zeroexp stage 3, {label}",
        "benchmarks.peers.zeroexp_engine",
        {"stage": 3, "offload": kind, **options},
        disk=kind.startswith("nvme"),
    )


def _deepspeed_offloaded(kind: str, label: str, **options: object) -> Mode:
    return Mode(
        f"ds3-{kind}{'-pipelined' if options else ''}",
        f"DeepSpeed stage 3, {label}",
        "benchmarks.peers.deepspeed_engine",
        {"stage": 3, "offload": kind, **options},
        interpreter="peers",
        disk=kind == "nvme",
    )


OFFLOADED: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            MODES["ds3"],
            _deepspeed_offloaded("cpu", "optimizer in host memory"),
            _deepspeed_offloaded("nvme", "optimizer on disk"),
            _deepspeed_offloaded(
                "nvme",
                "optimizer on disk, pipelined",
                pipeline_read=True,
                pipeline_write=True,
            ),
            MODES["zx3"],
            _offloaded("cpu", "optimizer in host memory"),
            _offloaded("nvme", "optimizer on disk"),
            _offloaded("nvme", "optimizer on disk, clipped to 1.0", clip=1.0),
            _offloaded("nvme_params", "optimizer and parameters on disk"),
        )
    }
)
"""Stage 3 with its state on other tiers, and the two that keep it on the device."""


def mode_named(name: str) -> Mode:
    """The mode of either table. Raises KeyError."""
    return MODES[name] if name in MODES else OFFLOADED[name]
