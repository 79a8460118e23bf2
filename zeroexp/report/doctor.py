"""``zeroexp doctor``: what this installation, this machine and a directory of it offer to a run.
Imports torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from zeroexp.config import Config
from zeroexp.config.byte_size import format_bytes
from zeroexp.folder import existing
from zeroexp.run import machine
from zeroexp.run.environment import available_cores
from zeroexp.run.provenance import versions
from zeroexp.run.record import human_bytes

if TYPE_CHECKING:
    from zeroexp.run.disk import DiskRate
    from zeroexp.tiers import EngineStatus

# Data workers hand over batches through shared memory; containers often come with 64 MiB.
_LITTLE_SHM = 1 << 30


def examine(directory: Path | None = None) -> str:
    """The report as text, one fact a line; a value that begins with ``!`` is one to act on.

    ``directory`` is probed for swap files, as :func:`zeroexp.run.disk.probe` says; None: that of
    the runs, or where it will be made.
    """
    rows = [(name, version or "not installed") for name, version in versions().items()]
    rows += _torch() + _ops() + _precision() + _machine() + _disk(directory)
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


def _disk(directory: Path | None) -> list[tuple[str, str]]:
    from zeroexp.run import disk

    wanted = Path(Config().paths.runs) if directory is None else directory
    where = existing(wanted)
    found = disk.probe(where)
    is_there = wanted.is_dir()
    rows = [
        ("directory", str(wanted) if is_there else f"{wanted} (not there yet; probed: {where})"),
        (
            "file system",
            f"{found.file_system or 'unknown'}, {human_bytes(found.free_bytes)} free"
            + ("; ! memory, not a disk" if found.file_system in disk.MEMORY_FILE_SYSTEMS else ""),
        ),
    ]
    engine = found.engine
    if engine is None:
        return [*rows, ("swap files", f"! {found.problem}")]
    why = "; ".join(dict.fromkeys(line.partition(": ")[2] for line in engine.buffered))
    direct = "yes" if found.direct else f"! no: {why}; the rates below are those of the page cache"
    io_uring = f"{'yes' if engine.engine == 'io_uring' else '! no'} ({engine.reason})"
    rows += [("direct I/O", direct), ("io_uring", io_uring)]
    rows.append(("disk rates", "  block size  queue depth  read (GB/s)  write (GB/s)"))
    for rate in found.rates:
        block = human_bytes(rate.block_size)
        figures = f"{rate.queue_depth:>11}  {rate.read / 1e9:11.2f}  {rate.write / 1e9:12.2f}"
        rows.append(("", f"{block:>12}  {figures}"))
    best = found.recommended
    if best is None:
        return [*rows, ("recommended", "nothing was measured in the time allowed")]
    rows.append(("recommended", " ".join(_keys(engine, best, directory))))
    return [*rows, ("", "(fewest bytes on their way within 10% of the best)")]


def _keys(engine: EngineStatus, best: DiskRate, directory: Path | None) -> list[str]:
    """The keys that make a run use ``best``, ready for a command line."""
    together = "queue_depth" if engine.engine == "io_uring" else "threads"
    keys = {
        "engine": engine.engine,
        "block_size": format_bytes(best.block_size),
        together: str(best.queue_depth),
    }
    if directory is not None:
        keys["dir"] = str(directory)
    return [shlex.quote(f"offload.nvme.{name}={value}") for name, value in keys.items()]


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
        ("huge pages", _huge_pages()),
        ("control group", f"limit {human_bytes(limit)}" if limit else "no memory limit"),
        (
            "/dev/shm",
            f"{'! ' if little else ''}{human_bytes(shm)} free"
            + ("; data.workers > 0 may fail: docker run --shm-size=8g" if little else ""),
        ),
    ]


def _huge_pages() -> str:
    setting = machine.huge_pages()
    if setting in ("always", "madvise"):
        return setting
    fix = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return f"! {setting or 'none'}: buffers on small pages, disk and memory are slower; {fix}"
