"""``zeroexp doctor``: what this installation and this machine offer to a run. Imports torch."""

from __future__ import annotations

from zeroexp.config import Config
from zeroexp.run import machine
from zeroexp.run.environment import available_cores
from zeroexp.run.provenance import versions
from zeroexp.run.record import human_bytes

# Data workers hand over batches through shared memory; containers often come with 64 MiB.
_LITTLE_SHM = 1 << 30


def examine() -> str:
    """The report as text, one fact a line; a line that begins with ``!`` is one to act on."""
    rows = [(name, version or "not installed") for name, version in versions().items()]
    rows += _torch() + _ops() + _precision() + _machine()
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _torch() -> list[tuple[str, str]]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [
        name
        for name, there in (
            ("gloo", torch.distributed.is_gloo_available()),
            ("nccl", torch.distributed.is_nccl_available()),
        )
        if there
    ]
    return [
        (
            "torch threads",
            f"{torch.get_num_threads()} of {available_cores()} cores of this process",
        ),
        ("collectives", ", ".join(backends) or "none"),
        ("devices", ", ".join(devices) or "no CUDA device: runs train on the CPU"),
    ]


def _ops() -> list[tuple[str, str]]:
    from zeroexp import ops

    found = ops.status()
    kind = f"compiled, {found.isa}" if found.compiled else "! not compiled: torch references"
    return [("ops", f"{kind} ({found.reason})")]


def _precision() -> list[tuple[str, str]]:
    config = Config().resolved()
    chosen, where = config.precision.compute, config.trainer.accelerator
    if where == "gpu":
        why = "the device multiplies bf16 natively"
    elif chosen == "bf16":
        why = "this CPU multiplies bf16 natively"
    else:
        why = "this CPU has neither AVX512-BF16 nor AMX: a bf16 step would be about 10 times slower"
    return [("precision=auto", f"{chosen} on {where}: {why}")]


def _machine() -> list[tuple[str, str]]:
    facts = machine.describe()
    hertz = facts["cpu_max_hertz"]
    speed = f", {hertz / 1e9:.2f} GHz" if hertz else ""
    limit = facts["memory_limit_bytes"]
    shm = facts["shm_free_bytes"]
    little = shm is not None and shm < _LITTLE_SHM
    return [
        ("CPU", f"{facts['cpu']}{speed}; {' '.join(facts['cpu_flags']) or 'no vector extensions'}"),
        ("memory", f"{human_bytes(facts['memory_bytes'])} for this process"),
        ("control group", f"limit {human_bytes(limit)}" if limit else "no memory limit"),
        (
            "/dev/shm",
            f"{'! ' if little else ''}{human_bytes(shm)} free"
            + ("; data.workers > 0 may fail: docker run --shm-size=8g" if little else ""),
        ),
    ]
