"""The folder of the swap files, seen from outside the ranks: what dead processes left in it. No
torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from zeroexp import scratch
from zeroexp.config import Config
from zeroexp.run.record import human_bytes

#: Seconds in which the kernel takes the locks of killed ranks away.
_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.05


def swap_folder(config: Config) -> Path | None:
    """Where a run of ``config`` (resolved) has its swap files; None for a run without."""
    folder = config.offload.nvme.dir
    return Path(folder) if config.offload.uses_files and folder is not None else None


def sweep_before(config: Config) -> list[str]:
    """Remove what earlier runs left; the line that says so, if there was anything."""
    folder = swap_folder(config)
    found = scratch.sweep(folder) if folder is not None else ()
    if not found:
        return []
    size = human_bytes(sum(size for _, size in found))
    folders = f"{len(found)} folder{'s' if len(found) > 1 else ''}"
    return [f"removed {folders} of swap files ({size}) that dead processes left in {folder}"]


def sweep_after(config: Config, *, failed: bool) -> None:
    """Remove what the ranks of this run left when they ended without their own clean-up.

    After a failure some may still be dying; a folder of another run that is alive is waited for in
    vain, and left alone.
    """
    folder = swap_folder(config)
    if folder is None:
        return
    until = time.monotonic() + (_PATIENCE_SECONDS if failed else 0)
    scratch.sweep(folder)
    while scratch.holds_any(folder) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        scratch.sweep(folder)
