"""What the disk gives to all ranks at once: one bare io_uring loop a rank, each on a file as large
as the rank's state, through as much memory as streaming takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import uring_loop
from benchmarks.contender import Contender, contender
from benchmarks.uring_loop import MIB

KINDS = ("read", "write", "mixed")
SETTINGS = ((2 * MIB, 4), (8 * MIB, 4))
MEMORY = 32 * MIB
"""Of one process: four chunks of ``offload.chunk``. Whole blocks of every setting."""


class Disk:
    """``ranks`` processes for each of the settings."""

    def __init__(self, teams: list[list[Contender]], num_bytes: int) -> None:
        self._teams = teams
        self.num_bytes = num_bytes

    def rates(self) -> dict[str, float]:
        """Bytes per second of all processes together, by kind of pass: the best setting, from the
        start of all to the end of the slowest. A mixed pass reads and writes every byte."""
        best = dict.fromkeys(KINDS, 0.0)
        for team in self._teams:
            for kind in KINDS:
                for one in team:
                    one.tell(kind)
                seconds = max(float(one.answer()) for one in team)
                moved = len(team) * self.num_bytes * (2 if kind == "mixed" else 1)
                best[kind] = max(best[kind], moved / seconds)
        return best


@contextmanager
def measured(folder: Path, ranks: int, num_bytes: int) -> Iterator[Disk]:
    """Files of ``num_bytes`` for each rank below ``folder``, and processes that wait. Raises
    Unavailable where there is no compiler or the file system refuses direct transfers."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="zeroexp-disk-", dir=folder) as scratch, ExitStack() as stack:
        loop = uring_loop.build(Path(scratch))
        files = [Path(scratch) / f"rank{rank}" for rank in range(ranks)]
        for file in files:
            with file.open("wb") as out:
                for start in range(0, num_bytes, MEMORY):
                    # Not zeros, which a virtual disk may not keep as bytes.
                    out.write(b"\1" * min(MEMORY, num_bytes - start))
                os.fsync(out.fileno())
        teams = []
        for block, depth in SETTINGS:
            sizes = [str(n) for n in (num_bytes, block, depth, MEMORY)]
            commands = [[str(loop), str(file), *sizes] for file in files]
            teams.append([stack.enter_context(contender(c, {}, ready=False)) for c in commands])
        yield Disk(teams, num_bytes)
