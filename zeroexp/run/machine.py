"""What the machine is, read from files: CPU, memory, GPUs. No torch."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from pathlib import Path
from typing import Any

from zeroexp.config.hardware import cpu_flags
from zeroexp.run.environment import available_cores
from zeroexp.run.procfs import cgroup_limit_bytes, total_memory_bytes

# Flags worth recording: what kernels and the choice of precision depend on.
_NOTABLE_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "amx_tile",
    "bf16",
    "svebf16",
)


def _cpuinfo(name: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def cpu_model() -> str:
    """The CPU's name, e.g. ``Intel(R) Xeon(R) Platinum 8481C``."""
    return _cpuinfo("model name") or platform.machine()


def cpu_hertz() -> float | None:
    """Highest clock rate in Hz: the frequency driver's maximum, else the rate of the first core
    now.
    """
    with contextlib.suppress(OSError, ValueError):
        return (
            float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
        )
    with contextlib.suppress(ValueError, TypeError):
        return float(str(_cpuinfo("cpu MHz"))) * 1e6
    return None


def notable_flags() -> list[str]:
    """The CPU's flags that kernels and the choice of precision depend on."""
    return [flag for flag in _NOTABLE_FLAGS if flag in cpu_flags()]


def gpu_names() -> list[str]:
    """Names of the NVIDIA devices as the driver gives them; empty without one."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("Model:"):
                    names.append(line.partition(":")[2].strip())
    return names


def huge_pages() -> str | None:
    """The kernel's setting of transparent huge pages: ``always``, ``madvise`` or ``never``; None
    where it has none.
    """
    with contextlib.suppress(OSError):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return setting.partition("[")[2].partition("]")[0]
    return None


def shm_free_bytes() -> int | None:
    """Free bytes of /dev/shm, through which data workers hand over batches; None without it."""
    with contextlib.suppress(OSError):
        stat = os.statvfs("/dev/shm")
        return stat.f_bavail * stat.f_frsize
    return None


def describe() -> dict[str, Any]:
    """The hardware block of run.json; sizes in bytes, frequency in Hz."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cpu_flags": notable_flags(),
        "cpu_max_hertz": cpu_hertz(),
        "cores": available_cores(),
        "memory_bytes": total_memory_bytes(),
        "memory_limit_bytes": cgroup_limit_bytes(),
        "shm_free_bytes": shm_free_bytes(),
        "gpus": gpu_names(),
    }
