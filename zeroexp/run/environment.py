"""The environment of the ranks: nothing inherited from another launch, and a fair number of threads
each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from zeroexp.run.procfs import RUN_MARK

# What torchrun, Lightning and other launchers leave in the environment of a process. Any of it,
# inherited by a new launch, gives a rank a wrong idea of the world it is in.
_LEAKED = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ]
)
_LEAKED_PREFIXES = ("TORCHELASTIC_", "PET_", "ZEROEXP_RUN_", "ZEROEXP_LAUNCH_")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def available_cores() -> int:
    """Cores this process may use: its affinity mask, or the control group's quota where that is
    less.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_rank(wanted: int | None, ranks: int, environ: Mapping[str, str]) -> int:
    """Threads of one rank: ``wanted`` (launch.threads_per_rank), else OMP_NUM_THREADS as set, else
    cores / ranks.
    """
    if wanted is not None:
        return wanted
    inherited = environ.get("OMP_NUM_THREADS", "")
    if inherited.isdigit() and int(inherited) > 0:
        return int(inherited)
    return max(1, available_cores() // ranks)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``environ`` without what another launch or another job of a sweep left there."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _LEAKED and not name.startswith(_LEAKED_PREFIXES)
    }


def for_ranks(environ: Mapping[str, str], *, run_id: str, threads: int) -> dict[str, str]:
    """The environment of agent and ranks: scrubbed, marked with the run, ``threads`` threads for
    each rank.
    """
    made = scrubbed(environ)
    made[RUN_MARK] = run_id
    for name in _THREAD_VARIABLES:
        made[name] = str(threads)
    # Output that sits in a buffer is lost when a rank is killed.
    made["PYTHONUNBUFFERED"] = "1"
    return made


def is_rank(environ: Mapping[str, str]) -> bool:
    """True when an elastic agent or a cluster launcher started this very process as one rank of
    several.
    """
    return all(
        environ.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    ) and bool(environ.get("MASTER_ADDR"))
