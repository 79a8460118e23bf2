"""Sweeps: every job a run of its own, failures as rows, what is done stays done."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path

import pytest
from processes import HERE, TINY, Command, wait_for_rows, wait_until

from zeroexp.run import procfs

pytestmark = pytest.mark.ranks

EXTERNAL = [
    "model=external",
    "model.target=faulty:Faulty",
    *(word for word in TINY if not word.startswith("model.")),
]


def table(sweep: Path) -> list[dict[str, str]]:
    with open(sweep / "results.csv") as file:
        return list(csv.DictReader(file))


def test_a_failed_job_is_a_row_and_what_is_done_is_skipped(train: Command) -> None:
    """HY-01, HY-02, HY-13."""
    shutil.copy(HERE / "faulty.py", train.where)
    words = [*EXTERNAL, "-m", "model.kwargs.fault=none,exit", "trainer.devices=1,2"]
    words.append("data.workers=2")  # processes of the ranks, which end with them
    done = train(*words, "model.kwargs.rank=0", "--sweep-dir", "out", seconds=300)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = table(train.where / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "crash", "crash"]
    assert [row["trainer.devices"] for row in rows] == ["1", "2", "1", "2"]
    assert [row["failed_rank"] for row in rows] == ["", "", "0", "0"]
    runs = sorted(path for path in (train.where / "out").iterdir() if path.is_dir())
    assert len(runs) == 4
    # each job had its own world: nothing of the one before reached it
    worlds = [len(list(run.glob("rank*.log"))) for run in runs]
    assert worlds == [1, 2, 1, 2]
    results = [json.loads((run / "result.json").read_text()) for run in runs[:2]]
    assert results[0]["loss_last"] == pytest.approx(results[1]["loss_last"], rel=1e-5)
    assert "2 of 4 runs failed" in done.stdout
    assert "exit code 3" in (train.where / "out" / "results.md").read_text()

    again = train(*words, "model.kwargs.rank=0", "--sweep-dir", "out", "--fail-fast", seconds=300)
    assert again.returncode == 1
    assert again.stdout.count("done already") == 2
    rows = table(train.where / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "crash"]  # and there --fail-fast ends it
    assert "1 not started" in again.stdout


def test_a_job_that_cannot_be_configured_is_a_row(train: Command) -> None:
    done = train(*TINY, "-m", "zero=stage0,stage3", "trainer.devices=1,3", seconds=300)
    assert done.returncode == 1
    (sweep,) = train.runs("runs/train/*")
    rows = table(sweep)
    assert [row["status"] for row in rows] == ["ok", "config", "ok", "config"]
    assert "data.batch_size" in rows[1]["reason"]
    assert len([path for path in sweep.iterdir() if path.is_dir()]) == 2
    assert (sweep / "memory_throughput.png").stat().st_size > 1000


def test_a_sweep_whose_every_job_is_wrong_starts_nothing(train: Command) -> None:
    done = train("-m", "zero=stage0,stage1", "zero.stgae=1")
    assert done.returncode == 2 and "zero.stage" in done.stderr
    assert list(train.where.iterdir()) == []


def test_ctrl_c_ends_the_whole_sweep(train: Command) -> None:
    process = train.start(*TINY, "trainer.max_steps=100000", "-m", "zero=stage0,stage3")
    log = wait_until(lambda: train.runs("runs/*/*/*/rank0.log"), 120, "rank0.log")[0]
    wait_for_rows(log.parent, 2)
    run_id = json.loads((log.parent / "launch" / "launch.json").read_text())["run_id"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert procfs.marked(run_id) == []
    (sweep,) = train.runs("runs/train/*")
    assert [row["status"] for row in table(sweep)] == ["interrupted"]
    assert f"--sweep-dir {sweep}" in out


def test_a_named_sweep_and_the_report(train: Command) -> None:
    words = [w for w in TINY if not w.startswith("measure")]
    done = train("sweep=scaling", *words, "zero=stage3", "-q", seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = train.runs("runs/scaling/*")
    assert sweep.name.endswith("-scaling")
    assert [row["trainer.devices"] for row in table(sweep)] == ["1", "2"]
    report = train("report", "runs")
    assert report.returncode == 0
    assert report.stdout.splitlines()[0].split()[:2] == ["run", "data.micro_batch_size"]
    assert train("report", "nowhere").returncode == 2
