"""Fixtures of the end-to-end tests: stub runs, and ``python train.py`` in a directory of its
own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import Command, StubRun


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
