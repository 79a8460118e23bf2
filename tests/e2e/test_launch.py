"""Starting, watching and ending ranks, with stub ranks that do nothing but gloo all-reduces."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import StubRun, wait_until

from zeroexp.run import procfs

pytestmark = pytest.mark.ranks
Start = Callable[..., StubRun]


def test_a_good_run_shows_rank_0_and_leaves_nothing(stub: Start) -> None:
    run = stub("ok")
    said = run.verdict(120)
    assert said["status"] == "ok" and run.process.returncode == 0
    assert [line for line in said["output"].splitlines() if line.startswith("step")] == [
        f"step {i}/5  loss 1.0" for i in range(1, 6)
    ]
    assert (run.directory / "rank1.log").exists()
    assert run.left_over() == []


def test_the_rank_that_raises_is_named_and_the_others_end(stub: Start) -> None:
    run = stub("raise", "1")
    said = run.verdict(120)
    assert (said["status"], said["failed_rank"]) == ("crash", 1)
    assert said["reason"] == "rank 1: ValueError: boom"
    assert "Traceback" not in said["output"]  # rank 0's complaint about its lost peer is not shown
    assert run.left_over() == []


def test_a_rank_that_exits_without_a_word_is_named(stub: Start) -> None:
    said = stub("exit", "1").verdict(60)
    assert (said["status"], said["failed_rank"]) == ("crash", 1)
    assert "exit code 3" in said["reason"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(stub: Start, victim: int) -> None:
    run = stub("child", "1", ranks=3)  # rank 1 has a grandchild in a session of its own
    run.wait_for_step(3)
    time.sleep(random.uniform(0, 0.3))
    os.kill(run.pid_of_rank(victim), signal.SIGKILL)
    said = run.verdict(120)
    assert (said["status"], said["failed_rank"]) == ("crash", victim)
    assert "SIGKILL" in said["reason"]
    assert run.left_over() == []


def test_a_rank_killed_for_memory_is_oom(stub: Start, limited: Callable[[int], Path]) -> None:
    run = stub("eat", "1", within=limited(700 << 20))  # two ranks fit, one that eats does not
    said = run.verdict(150)
    assert (said["status"], said["failed_rank"]) == ("oom", 1), said
    assert run.left_over() == []


def test_a_rank_that_hangs_ends_the_run_at_the_deadline(stub: Start) -> None:
    run = stub("hang", "1", STUB_TIMEOUT="2")
    said = run.verdict(120)
    assert (said["status"], said["failed_rank"], said["first_rank"]) == ("timeout", 1, 0)
    stack = (run.directory / "launch" / "stack1.txt").read_text()
    assert "stub_rank.py" in stack and "in main" in stack
    assert run.left_over() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_driver_ends_everything(stub: Start, number: int, code: int) -> None:
    run = stub("child", "0")
    run.wait_for_step(3)
    run.process.send_signal(number)
    said = run.verdict(120)
    assert (said["status"], run.process.returncode) == ("interrupted", code)
    assert run.left_over() == []


def test_a_signal_before_the_ranks_exist_ends_everything(stub: Start) -> None:
    run = stub("loop")
    run.run_id()
    run.process.send_signal(signal.SIGINT)
    assert run.verdict(120)["status"] == "interrupted"
    assert run.left_over() == []


def test_ranks_that_hang_end_on_ctrl_c(stub: Start) -> None:
    run = stub("hang", "1")  # rank 0 waits inside a collective, where no Python handler runs
    run.wait_for_step(2)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.verdict(120)["status"] == "interrupted"
    assert run.left_over() == []


def test_ranks_die_with_a_killed_driver(stub: Start) -> None:
    run = stub("loop")
    run.wait_for_step(3)
    assert len(run.left_over()) == 3  # the agent and two ranks
    run.process.kill()
    wait_until(lambda: run.left_over() == [], 10, "end of the ranks")


def test_two_runs_at_once_do_not_meet(stub: Start) -> None:
    """CF-10."""
    runs = [stub("ok", MASTER_PORT="29500"), stub("ok", MASTER_PORT="29500")]
    with socket.socket() as taken:  # and the port that everybody uses is taken
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 29500))
        assert [run.verdict(150)["status"] for run in runs] == ["ok", "ok"]


def test_ranks_see_a_clean_environment(stub: Start) -> None:
    """HY-10."""
    run = stub(
        "env",
        RANK="7",
        LOCAL_RANK="7",
        MASTER_PORT="1",
        PL_GLOBAL_SEED="3",
        TORCHELASTIC_RUN_ID="x",
        OMP_NUM_THREADS="5",
    )
    assert run.verdict(120)["status"] == "ok"
    for rank in (0, 1):
        seen = json.loads((run.directory / f"env{rank}.json").read_text())
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert seen["MASTER_PORT"] != "1" and seen["TORCHELASTIC_RUN_ID"] != "x"
        assert "PL_GLOBAL_SEED" not in seen
        assert seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "1"
        assert seen[procfs.RUN_MARK] == run.run_id()


def test_ranks_start_again_after_a_crash(stub: Start) -> None:
    run = stub("once", "1", retries=1)
    said = run.verdict(150)
    assert said["status"] == "ok", said
    assert "ValueError: boom" in said["output"] and "retry 1 of 1" in said["output"]
    assert "step 5/5" in said["output"]


def test_a_run_on_one_rank_has_a_process_of_its_own_too(stub: Start) -> None:
    run = stub("env", ranks=1)
    assert run.verdict(120)["status"] == "ok"
    assert json.loads((run.directory / "env0.json").read_text())["WORLD_SIZE"] == "1"
