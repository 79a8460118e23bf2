"""Fixtures of the end-to-end tests: stub runs, and ``python train.py`` in a directory of its
own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import Command, StubRun, wait_until

from zeroexp.run import procfs


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Callable[..., StubRun]]:
    """Starts :class:`StubRun` in directories of its own: ``stub("loop", ranks=2)``."""
    started: list[StubRun] = []

    def start(
        *arguments: str,
        ranks: int = 2,
        retries: int = 0,
        within: Path | None = None,
        **env: str,
    ) -> StubRun:
        directory = tmp_path / f"run{len(started)}"
        directory.mkdir()
        started.append(StubRun(directory, ranks, retries, *arguments, within=within, **env))
        return started[-1]

    yield start
    for run in started:
        run.end()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Command]:
    """``train("zero=stage3", …)`` runs ``python train.py`` in a directory of its own."""
    command = Command(tmp_path)
    yield command
    command.end()


@pytest.fixture
def limited() -> Iterator[Callable[[int], Path]]:
    """Makes a control group whose processes may use so many bytes of memory together."""
    made: list[Path] = []

    def make(num_bytes: int) -> Path:
        group = next(iter(procfs.memory_groups()), None)
        if group is None or not os.access(group, os.W_OK):
            pytest.skip("control groups cannot be made here")
        path = group / f"zeroexp-test-{os.getpid()}-{len(made)}"
        try:
            path.mkdir()
            made.append(path)
            v2 = (path / "memory.max").exists()
            (path / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(num_bytes))
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        return path

    yield make
    for path in made:
        wait_until(
            lambda path=path: not (path / "cgroup.procs").read_text(), 20, "empty control group"
        )
        path.rmdir()


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes."""
    made: list[Path] = []

    def make(num_bytes: int) -> Path:
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(place)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        made.append(place)
        return place

    yield make
    for place in made:
        subprocess.run(["umount", "-l", str(place)], check=True)
