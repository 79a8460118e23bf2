"""What a result must say about where it comes from: command, commit, machine. No host names, no
absolute paths."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile")


def _field(file: str, key: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """Processor, memory and kernel of this host."""
    flags = set(_field("/proc/cpuinfo", "flags").split())
    family, model = (_field("/proc/cpuinfo", key) for key in ("cpu family", "model"))
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_family_model": f"{family}/{model}",
        "cores": os.cpu_count(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "memory_bytes": memory_bytes("MemTotal"),
        "kernel": platform.release(),
        "transparent_hugepages": huge.read_text().split("[")[-1].split("]")[0]
        if huge.exists()
        else None,
    }


def memory_bytes(key: str) -> int:
    """One entry of /proc/meminfo in bytes (0 if the host has none)."""
    value = _field("/proc/meminfo", key)
    return int(value.split()[0]) * 1024 if value else 0


def provenance(kind: str, arguments: list[str]) -> dict[str, Any]:
    """The head of a result file. ``dirty`` is True if tracked files differed from the commit."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "schema_version": 1,
        "kind": kind,
        "command": f"python -m benchmarks {shlex.join(arguments)}",
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(status) if status is not None else None,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        # What else the machine was doing: a figure well above 0 here means disturbed numbers.
        "load_before": os.getloadavg()[0],
    }
