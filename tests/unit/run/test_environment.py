"""The environment of ranks: nothing of another launch, the right number of threads."""

from __future__ import annotations

import pytest

from zeroexp.run import environment
from zeroexp.run.environment import for_ranks, is_rank, scrubbed, threads_per_rank


def test_what_another_launch_left_does_not_reach_a_rank() -> None:
    leaked = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PL_GLOBAL_SEED": "7",
    }
    kept = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "0", "MY_RANK": "3"}
    assert scrubbed({**leaked, **kept}) == kept


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    assert threads_per_rank(None, 2, {}) == 4
    assert threads_per_rank(None, 3, {}) == 2
    assert threads_per_rank(None, 16, {}) == 1
    assert threads_per_rank(3, 2, {"OMP_NUM_THREADS": "1"}) == 3
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "1"}) == 1
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "many"}) == 4


def test_threads_and_mark_are_set() -> None:
    made = for_ranks({"OMP_NUM_THREADS": "9", "RANK": "4"}, run_id="abc", threads=2)
    assert made == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "ZEROEXP_RUN_ID": "abc",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_leaked_local_rank_alone_makes_no_rank() -> None:
    whole = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert is_rank(whole)
    for name in whole:
        assert not is_rank({k: v for k, v in whole.items() if k != name})
