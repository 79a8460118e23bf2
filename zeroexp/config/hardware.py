"""What this machine is, as far as defaults depend on it. Reads files only: no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Flags of /proc/cpuinfo that mean a bf16 product in one instruction. Without them a bf16 step is
# emulated and about
# ten times slower than fp32.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
# The same for 64-bit Arm, where the line is called Features.
BF16_FEATURES = frozenset({"bf16", "svebf16"})


@cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction set flags of the first core; empty where the file does not exist."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def has_gpu(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver has a device that CUDA_VISIBLE_DEVICES does not hide."""
    environ = os.environ if environ is None else environ
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return False
    return (root / "dev/nvidiactl").exists() and any(root.glob("dev/nvidia[0-9]*"))


def default_accelerator(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> str:
    """``gpu`` or ``cpu``: what ``trainer.accelerator=auto`` means here."""
    return "gpu" if has_gpu(environ, root) else "cpu"


def default_compute(accelerator: str, flags: frozenset[str] | None = None) -> str:
    """``bf16`` or ``fp32``: what ``precision.compute=auto`` means on ``accelerator``."""
    if accelerator == "gpu":
        return "bf16"
    flags = cpu_flags() if flags is None else flags
    return "bf16" if flags & (BF16_FLAGS | BF16_FEATURES) else "fp32"
