"""What the swap files of a rank cost a run: bytes, rate, waiting, and wear of the disk. No torch.

Bytes are those that were asked of the file system; what a disk does with them inside (write
amplification) is not seen from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

_SECONDS_PER_DAY = 86_400
_GIGA, _TERA = 1e9, 1e12


class Moved(Protocol):
    """Bytes, and the seconds in which something waited for them or they were on their way; see
    :class:`zeroexp.tiers.Moved`."""

    @property
    def read(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def waited(self) -> float: ...
    @property
    def busy(self) -> float: ...


class DiskUse:
    """Adds up what the steps of one rank moved. Steps of the warm-up count only where there is no
    other."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup = warmup_steps
        self._steps: list[tuple[int, Moved, float]] = []

    def add(self, number: int, moved: Moved, seconds: float) -> None:
        """Step ``number`` of this process (the first is 1) moved that and took ``seconds``."""
        self._steps.append((number, moved, seconds))

    def figures(self, total: Moved, alone: Mapping[str, float] | None = None) -> dict[str, Any]:
        """``io`` of a rank in result.json. ``total``: all since the files were made; ``alone``:
        GB/s of the engine with nothing beside it, by direction."""
        counted = [s for s in self._steps if s[0] > self._warmup] or self._steps
        moved = [m for _, m, _ in counted]
        seconds = sum(s for _, _, s in counted)
        return {
            "read_total": total.read,
            "written_total": total.written,
            "steps": len(counted),
            "gb_per_s": gb_per_s(
                sum(m.read + m.written for m in moved), sum(m.busy for m in moved)
            ),
            "alone_gb_per_s": dict(alone) if alone is not None else None,
            "waited_s_per_step": sum(m.waited for m in moved) / len(moved) if moved else None,
            "waited_fraction": sum(m.waited for m in moved) / seconds if seconds > 0 else None,
            "written_tb_per_day": (
                sum(m.written for m in moved) / seconds * _SECONDS_PER_DAY / _TERA
                if seconds > 0
                else None
            ),
        }


def gb_per_s(num_bytes: int, seconds: float) -> float | None:
    """10^9 bytes a second; None where no time passed."""
    return num_bytes / seconds / _GIGA if seconds > 0 else None


_SUMMED = ("read_total", "written_total", "written_tb_per_day")


def over_ranks(by_rank: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float] | None:
    """The sums over all ranks that make sense; None where no rank has swap files, and for a sum of
    which a part is unknown."""
    known = [figures for figures in by_rank.values() if figures is not None]
    if not known:
        return None
    sums: dict[str, Any] = {}
    for key in _SUMMED:
        parts = [figures.get(key) for figures in known]
        numbers = [part for part in parts if part is not None]
        whole = len(numbers) == len(by_rank)
        sums[key] = sum(numbers) if whole else None
    return sums
