"""Fixtures of the rank tests: ``ranks(n)(fn, *args)`` runs a function on n gloo ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import DEADLINE, Pool  # type: ignore[import-not-found]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


class Ranks:
    """Runs functions on a fixed number of ranks.

    ``output`` holds what each rank printed in the last call.
    """

    def __init__(self, pool: Pool, num_ranks: int) -> None:
        self._pool, self._num_ranks = pool, num_ranks
        self.output: list[str] = []

    def __call__(
        self, fn: Callable[..., Any], *args: Any, timeout: float = DEADLINE, **kwargs: Any
    ) -> list[Any]:
        """Results of ``fn(*args, **kwargs)`` in rank order; a rank's failure is a ``RankError``."""
        results, self.output = self._pool.run(self._num_ranks, fn, args, kwargs, timeout)
        for rank, text in enumerate(self.output):
            if text.strip():
                print(f"[rank {rank}] {text.rstrip()}")
        return results


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: Pool) -> Callable[[int], Ranks]:
    """``ranks(n)(fn, *args, timeout=60) -> [result of rank 0, …]``; fn finds a fresh gloo group."""
    return lambda num_ranks: Ranks(rank_pool, num_ranks)
