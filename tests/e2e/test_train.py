"""``python train.py`` as a user starts it: what is printed, what is left behind, how it fails."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import HERE, TINY, Command, wait_for_rows, wait_until

from zeroexp.run import procfs

pytestmark = pytest.mark.ranks

EXTERNAL = [
    "model=external",
    "model.target=faulty:Faulty",
    "data=synthetic",
    *(word for word in TINY if not word.startswith(("model.", "data=synthetic"))),
]


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def external(train: Command, fault: str, *words: str, **env: str) -> Any:
    shutil.copy(HERE / "faulty.py", train.where)
    return train(*EXTERNAL, f"model.kwargs.fault={fault}", "trainer.devices=2", *words, **env)


def num_params(layers: int, dim: int, vocab: int) -> int:
    """A GPT with rotary positions, GELU, RMSNorm and a tied head, counted by hand: per block the
    four attention matrices, two of the MLP (4 dim wide) and two norms; then embedding and last
    norm.
    """
    return layers * (4 * dim * dim + 2 * 4 * dim * dim + 2 * dim) + vocab * dim + dim


def test_a_run_leaves_everything_behind_and_what_happened_is_what_was_planned(
    train: Command,
) -> None:
    words = ["trainer.devices=2", "checkpoint=full", "logger.kinds=[tensorboard,csv]"]
    done = train(*TINY, "zero=stage3", *words, "checkpoint.every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = train.runs()
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml", "origins.yaml", "plan.json", "run.json", "status.json", "metrics.jsonl",
        "result.json", "rank0.log", "rank1.log", "checkpoints",
    }  # fmt: skip

    # what is printed: few lines before step 1, rank 0 only, no surprises
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step 1/4"))
    assert first <= 20
    assert done.stderr == ""
    assert not [line for line in lines if "Warning" in line or "Traceback" in line]
    assert "ok after" in lines[-1]

    # the record
    assert read(run / "status.json")["status"] == "ok"
    described = read(run / "run.json")
    assert described["argv"][-1] == "checkpoint.every=2"
    assert described["versions"]["torch"] and described["hardware"]["cores"] >= 1
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["zero"]["stage"] == 3 and config["data"]["micro_batch_size"] == 2
    origins = yaml.safe_load((run / "origins.yaml").read_text())
    assert origins["trainer.devices"] == "command line"

    # the figures
    result = read(run / "result.json")
    assert (result["status"], result["steps"], result["global_batch"]) == ("ok", 4, 4)
    assert result["skipped_steps"] == 0 and result["failed_rank"] is None
    assert abs(result["loss_first"] - math.log(64)) < 1.0  # untrained: about uniform over 64 tokens
    assert result["step_time_s"]["n"] == 3  # one step of warm-up
    elements = num_params(layers=2, dim=32, vocab=64)
    for rank in ("0", "1"):
        state = result["state_bytes"][rank]
        padding = result["padding_bytes"][rank]
        held = sum(state[kind]["device"] for kind in ("params", "grads", "optim"))
        # fp32 parameter, gradient and two moments, half of each on each rank
        assert held - padding == pytest.approx(16 * elements / 2, abs=16 * 32)
        sent = result["comm_bytes_per_step"][rank]
        # two all-gathers and a reduce-scatter, half of the padded model each
        assert sent["all_gather"] == 2 * sent["reduce_scatter"]
        assert sent["reduce_scatter"] >= 4 * elements / 2
        assert result["rss_baseline_bytes"][rank] < result["peak_rss_bytes"][rank]
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    assert result["predicted"]["padding_bytes"] == result["padding_bytes"]
    for rank, sent in result["comm_bytes_per_step"].items():
        del sent["control"]
        assert result["predicted"]["comm_bytes_per_step"][rank] == sent

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert rows[-1]["val_loss"] == result["val_loss"]
    assert rows[0]["loss"] == result["loss_first"]
    del rows[1]["sent_bytes"]["control"]  # the first step also has the start weights' broadcast
    assert rows[1]["sent_bytes"] == result["comm_bytes_per_step"]["0"]
    assert rows[0]["state_bytes"] == result["state_bytes"]["0"]
    assert all(row["grad_norm_clipped"] <= 1.0 + 1e-6 for row in rows if "loss" in row)

    # the same in other loggers, the prediction beside what happened
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [1, 2, 4]
    for name in ("state_bytes/optim", "sent_bytes/all_gather"):
        assert curves.Scalars(name)[-1].value == curves.Scalars(f"predicted_{name}")[-1].value > 0
    assert "train/loss" in (run / "csv" / "metrics.csv").read_text().splitlines()[0]

    # and it goes on from its checkpoint, on another number of ranks
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004.ckpt"]
    more = train(*TINY, f"checkpoint.resume={run}", "trainer.max_steps=6", "name=more")
    assert more.returncode == 0, more.stdout + more.stderr
    (second,) = train.runs("runs/more/*")
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [5, 6]
    assert read(second / "run.json")["resumed_from"].endswith("step-00000004.ckpt")


def test_quiet_prints_nothing_while_all_is_well(train: Command) -> None:
    """CF-11."""
    words = [*TINY, "-q", "measure.log_every=2", "--local_rank=0", "--local-rank", "1"]
    done = train(*words, LOCAL_RANK="1")  # what old launchers append and leave behind
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (run,) = train.runs()
    assert read(run / "status.json")["status"] == "ok"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [2, 4]


def test_validation_at_the_end_whatever_ends_the_run(train: Command) -> None:
    """TL-07."""
    (train.where / "text.txt").write_text("abcdefgh" * 100)
    words = [w for w in TINY if not w.startswith(("data=", "trainer.max_steps", "model.vocab"))]
    data = ["data=text", "data.path=text.txt", "data.val_fraction=0.2", "trainer.devices=2"]
    accumulate = ["trainer.accumulate_grad_batches=2", "trainer.max_epochs=2"]
    done = train(*words, *data, *accumulate, "trainer.max_steps=-1")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = train.runs()
    # 640 bytes to train on: 39 sequences of 16 and the byte after, 9 batches of 4 in an epoch
    assert read(run / "result.json")["steps"] == 18
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [18]
    # a step is one of the optimizer, two micro-batches, wherever it is counted
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 19))
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert shown == ["1", *map(str, range(2, 19, 2))]


def test_the_first_error_leads(train: Command) -> None:
    done = external(train, "raise")
    assert done.returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert (status["status"], status["failed_rank"]) == ("crash", 1)
    assert status["reason"] == "rank 1: ValueError: boom"
    lines = done.stdout.splitlines()
    head = lines.index("first error, on rank 1:")
    assert "Traceback" in lines[head + 1]
    assert not [line for line in lines[:head] if "Error" in line]
    assert len(lines) - head < 15 and any("frames in" in line for line in lines)
    assert "ValueError: boom" in (run / "rank1.log").read_text()
    assert read(run / "result.json")["steps"] == 1
    # a model without a validation is not validated, and told so where somebody asked for it
    off = "validation is off: faulty:Faulty has no validation_step, so trainer.val_batches=1"
    assert [line for line in lines if "validation" in line] == [f"{off} has no effect"]


def test_a_full_disk_is_the_reason_wherever_it_is_written(
    train: Command, disk_of: Callable[[int], Path]
) -> None:
    small_disk = disk_of(600 << 10)
    # 105 KiB of weights, three times in a checkpoint: the second one finds no room
    words = ["checkpoint=full", "checkpoint.every=1", "checkpoint.keep=9", "measure.log_every=1"]
    done = train(*TINY, *words, f"paths.runs={small_disk}", "trainer.devices=2")
    assert done.returncode == 1
    (run,) = small_disk.glob("*/*")
    status = read(run / "status.json")
    assert (status["status"], status["failed_rank"]) == ("crash", 0)
    assert "No space left on device: " in status["reason"], status
    assert f"{run}/checkpoints/.step-0000000" in status["reason"]
    assert status["reason"] in done.stdout and done.stderr == ""
    assert "Traceback" not in done.stdout
    assert read(run / "result.json")["status"] == "crash"
    # nothing half-written stays
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert saved and all(name.startswith("step-") for name in saved)


def test_a_rank_killed_in_the_middle_of_a_save_costs_that_checkpoint_only(train: Command) -> None:
    """PL-17."""
    save = ["checkpoint=full", "checkpoint.every=1", "checkpoint.keep=1"]
    done = external(train, "save", "model.kwargs.rank=0", *save)
    assert done.returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert (status["status"], status["failed_rank"]) == ("crash", 0) and "SIGKILL" in status[
        "reason"
    ]
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == [".step-00000002.ckpt.part", "step-00000001.ckpt"]
    done = external(train, "none", f"checkpoint.resume={run}", "name=more", *save)
    assert done.returncode == 0, done.stdout + done.stderr
    (second,) = train.runs("runs/more/*")
    lost, redone = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, second)
    )
    assert [row["step"] for row in lost] == [1, 2]
    assert [row["step"] for row in redone] == [2, 3, 4]
    assert redone[0]["loss"] == pytest.approx(lost[1]["loss"], rel=1e-6)


def test_a_loss_that_is_not_finite_ends_with_status_nan(train: Command) -> None:
    done = external(train, "infinite")
    assert done.returncode == 1
    (run,) = train.runs()
    assert read(run / "status.json")["status"] == "nan"
    assert "not finite" in done.stdout or "non-finite" in done.stdout


def test_an_allocation_that_fails_ends_with_status_oom(train: Command) -> None:
    assert external(train, "memory").returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert (status["status"], status["failed_rank"]) == ("oom", 1)


def test_a_hanging_rank_ends_with_status_timeout(train: Command) -> None:
    done = external(train, "hang", "launch.timeout=15")
    assert done.returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert (status["status"], status["failed_rank"]) == ("timeout", 1), status
    assert "faulty.py" in (run / "launch" / "stack1.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("frozen", "the model has no trainable parameter"),
        ("vector", "the loss must be a scalar tensor"),
        ("silent", "training_step returned None"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_message(
    train: Command, fault: str, said: str
) -> None:
    done = external(train, fault)
    assert done.returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert status["status"] == "crash"
    assert said in status["reason"] and not status["reason"].endswith(":")
    assert f"{status['reason']}\n" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (run / f"rank{status['failed_rank']}.log").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zero.stgae=3"], "zero.stage"),
        (["trainer.devices=5"], "data.batch_size"),
        (["data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["pipeline=1f1b"], "pipeline"),
        (["data.batch_size=2", "trainer.devices=4"], "data.batch_size"),
        (["--frobnicate"], "frobnicate"),
        (["checkpoint.resume=nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_message_and_no_directory(
    train: Command, words: list[str], said: str
) -> None:
    done = train(*words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and list(train.where.iterdir()) == []


def test_an_empty_data_file_is_one_message(train: Command) -> None:
    (train.where / "empty.txt").touch()
    done = train("data=text", "data.path=empty.txt")
    assert done.returncode == 2 and "empty.txt" in done.stderr
    assert [path.name for path in train.where.iterdir()] == ["empty.txt"]


def test_a_run_directory_that_cannot_be_written_is_one_message(train: Command) -> None:
    (train.where / "runs").write_text("a file where a directory should be")
    done = train(*TINY)
    assert done.returncode == 2
    assert "paths.runs" in done.stderr and "Traceback" not in done.stderr
    assert (train.where / "runs").read_text() == "a file where a directory should be"


def test_a_plan_that_does_not_fit_starts_nothing(train: Command) -> None:
    huge = ["model.dim=65536", "model.layers=100", "model.heads=64", "data=synthetic"]
    done = train(*huge, "precision=fp32")
    assert done.returncode == 1
    (run,) = train.runs()
    status = read(run / "status.json")
    assert status["status"] == "wont_fit" and "TiB" in status["reason"]
    assert read(run / "result.json")["predicted"]["state_bytes"]["0"]
    assert not (run / "rank0.log").exists()


def test_two_runs_of_one_moment_have_two_directories(train: Command) -> None:
    processes = [train.start(*TINY) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, out + err
    runs = train.runs()
    assert len(runs) == 2
    assert {read(run / "status.json")["status"] for run in runs} == {"ok"}


def test_ctrl_c_ends_a_real_run_with_all_its_processes(train: Command) -> None:
    process = train.start(*TINY, "trainer.devices=2", "trainer.max_steps=100000", "data.workers=1")
    log = wait_until(lambda: train.runs("runs/*/*/rank0.log"), 120, "rank0.log")[0]
    wait_for_rows(log.parent, 2)
    run_id = read(log.parent / "launch" / "launch.json")["run_id"]
    assert len(procfs.marked(run_id)) >= 5  # agent, two ranks, their data workers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert procfs.marked(run_id) == []
    status = read(log.parent / "status.json")
    assert (status["status"], status["reason"]) == ("interrupted", "Ctrl-C")
    assert "Traceback" not in out and err == ""
    assert read(log.parent / "result.json")["steps"] >= 2


def test_driver_needs_no_torch(train: Command) -> None:
    # A torch that cannot be imported stands first on the path of the driver; its error would be
    # seen.
    broken = train.where / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('the driver imported torch')")
    path = os.pathsep.join(filter(None, [str(broken), os.environ.get("PYTHONPATH")]))
    for words in (["plan", "zero=stage3", "trainer.devices=2"], ["explain", "zero.stage"], ["x=1"]):
        done = train(*words, PYTHONPATH=path)
        assert "imported torch" not in done.stdout + done.stderr
        assert done.returncode == (2 if words == ["x=1"] else 0)
