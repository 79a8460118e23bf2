"""``launch=external``: ranks that torchrun has started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from processes import CHECKOUT, HERE, TINY, Command, environment

pytestmark = pytest.mark.ranks


def torchrun(train: Command, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(CHECKOUT / "train.py"), *words],
        cwd=train.where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_ranks_of_torchrun_share_one_directory(train: Command) -> None:
    done = torchrun(train, *TINY, "launch=external", "zero=stage3")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = train.runs()
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("ok", 4)
    assert list(result["state_bytes"]) == ["0", "1"] and result["state_bytes"]["1"] is not None
    assert json.loads((run / "status.json").read_text())["status"] == "ok"
    assert len([line for line in done.stdout.splitlines() if line.startswith("step 1/4")]) == 1
    assert "step 4/4" in (run / "rank0.log").read_text() and (run / "rank1.log").exists()


def test_the_failed_rank_is_named(train: Command) -> None:
    shutil.copy(HERE / "faulty.py", train.where)
    words = [word for word in TINY if not word.startswith("model.")]
    external = ["launch=external", "model=external", "model.target=faulty:Faulty"]
    done = torchrun(train, *words, *external, "model.kwargs.fault=raise")
    assert done.returncode == 1
    (run,) = train.runs()
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["failed_rank"]) == ("crash", 1)
    assert status["reason"] == "rank 1: ValueError: boom"
    assert "boom" in done.stderr


def test_wrong_configuration_is_said_once(train: Command) -> None:
    done = torchrun(train, "launch=external", "trainer.devices=3", *TINY)
    assert done.returncode != 0
    assert done.stderr.count("problem in the configuration") == 1
    assert list(train.where.iterdir()) == []


@pytest.mark.parametrize("words", [["-m", "zero=stage0,stage1", "launch=external"], TINY])
def test_sweeps_and_local_launches_inside_ranks_are_refused(
    train: Command, words: list[str]
) -> None:
    done = torchrun(train, *words)
    assert done.returncode != 0
    assert "torchrun" in done.stderr and "runs" not in os.listdir(train.where)


def test_nobody_has_started_ranks(train: Command) -> None:
    done = train("launch=external", *TINY)
    assert done.returncode == 2
    assert "torchrun" in done.stderr and list(train.where.iterdir()) == []


def test_a_port_in_use_is_named(train: Command) -> None:
    """CF-10."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = train(
            "launch=external",
            *TINY,
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
    assert done.returncode == 2
    assert str(port) in done.stderr and "Traceback" not in done.stderr
    assert list(train.where.iterdir()) == []


def test_something_else_on_the_port_ends_with_one_message(train: Command) -> None:
    """It takes the connection and never answers, which torch's store waits for without end."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = train(
            "launch=external",
            "launch.timeout=3",
            *TINY,
            RANK="1",
            WORLD_SIZE="2",
            LOCAL_RANK="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            seconds=100,
        )
    assert done.returncode == 1
    said = f"zeroexp: rank 1 of 2 did not meet the others at 127.0.0.1:{port} within 3 s"
    assert len([line for line in done.stderr.splitlines() if line.startswith(said)]) == 1
    assert "Traceback" not in done.stderr and list(train.where.iterdir()) == []
