"""``offload=…`` as a user starts it: figures, files that are gone afterwards however a run ends,
and models that are larger than the memory they may use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, TINY, Command, wait_for_rows, wait_until

from zeroexp.run import procfs

pytestmark = pytest.mark.ranks

# the model of TINY, by hand: two blocks (attention 4 x 32 x 32, MLP 8 x 32 x 32, two norms),
# embedding (its transpose is the head) and the last norm
ELEMENTS = 2 * (12 * 32 * 32 + 2 * 32) + 64 * 32 + 32


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def swap_files(train: Command) -> list[Path]:
    return sorted((train.where / "runs" / "swap").rglob("*"))


def test_everything_on_disk_in_two_processes(train: Command) -> None:
    """And what comes of the second half of it when it is resumed (NV-08)."""
    words = [*TINY, "zero=stage3", "offload=nvme_params", "trainer.devices=2", "checkpoint=full"]
    words += ["checkpoint.every=2", "checkpoint.keep=2", "logger.kinds=[tensorboard]"]
    done = train(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert swap_files(train) == []
    (run,) = train.runs("runs/train/*")
    result = read(run / "result.json")
    assert result["status"] == "ok"
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    assert result["predicted"]["transfer_bytes_per_step"] == result["transfer_bytes_per_step"]
    for rank in ("0", "1"):
        state, moved = result["state_bytes"][rank], result["transfer_bytes_per_step"][rank]
        assert all(tiers["device"] == tiers["cpu"] == 0 for tiers in state.values())
        # fp32, half of it: parameter, gradient, and its copy with two moments
        on_disk = [state[kind]["nvme"] for kind in ("params", "grads", "optim")]
        assert on_disk == [pytest.approx(n * ELEMENTS / 2, rel=0.02) for n in (4, 4, 12)]
        # a gradient goes down, a parameter comes up for forward and for backward
        assert moved == {"down": on_disk[1], "up": 2 * on_disk[0]}
        files = result["io_bytes_per_step"][rank]
        planned = result["predicted"]["io_bytes_per_step"][rank]
        for way in ("read", "written"):  # transfers are whole blocks of 4096 bytes
            assert 0 <= files[way] - planned[way] < 40 * 4096
        io = result["io"][rank]
        assert io["steps"] == 2  # one of warm-up, and one with a checkpoint before it
        assert io["written_total"] >= sum(on_disk[:1] + on_disk[2:]) + 4 * planned["written"]
        assert io["read_total"] >= 4 * planned["read"]
        assert io["gb_per_s"] > 0 and 0 <= io["waited_fraction"] <= 1
        assert (io["alone_gb_per_s"] is not None) is (rank == "0")
    total = result["io_all_ranks"]
    assert total["read_total"] == sum(io["read_total"] for io in result["io"].values())
    assert total["written_tb_per_day"] > 0

    assert "in swap files" in done.stdout and "GB/s reading" in done.stdout
    assert "TB written per day" in done.stdout and "to and from other tiers" in done.stdout
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    for name in ("transfer_bytes/down", "transfer_bytes/up"):
        assert curves.Scalars(name)[0].value == curves.Scalars(f"predicted_{name}")[0].value > 0
    for name in ("io_bytes/read", "io_bytes/written", "predicted_io_bytes/read"):
        assert curves.Scalars(name)[-1].value > 0
    assert {"speed/io_gb_per_s", "speed/io_waited_s"} <= set(curves.Tags()["scalars"])

    first_half = run / "checkpoints" / "step-00000002.ckpt"
    again = train(*words, f"checkpoint.resume={first_half}", "name=again")
    assert again.returncode == 0, again.stdout + again.stderr
    (path,) = train.runs("runs/again/*/result.json")
    resumed = read(path)
    assert resumed["loss_last"] == result["loss_last"]
    assert resumed["val_loss"] == result["val_loss"]
    assert swap_files(train) == []


@pytest.mark.full
def test_a_sweep_over_the_kinds_of_offload(train: Command) -> None:
    done = train("-m", *TINY, "zero=stage2", "offload=cpu,nvme")
    assert done.returncode == 0, done.stdout + done.stderr
    assert swap_files(train) == []
    on_cpu, on_nvme = (read(path) for path in train.runs("runs/*/*-sweep/*/result.json"))
    for tier, result in (("cpu", on_cpu), ("nvme", on_nvme)):
        assert result["state_bytes"] == result["predicted"]["state_bytes"]
        assert result["state_bytes"]["0"]["optim"]["device"] == 0
        assert result["state_bytes"]["0"]["optim"][tier] >= 12 * ELEMENTS
    # where state lives changes nothing else
    for key in ("loss_first", "loss_last", "val_loss", "transfer_bytes_per_step"):
        assert on_cpu[key] == on_nvme[key]
    assert on_cpu["io"] == {"0": None} and on_cpu["io_all_ranks"] is None
    assert on_nvme["io"]["0"]["written_total"] > 0
    for heading in ("on cpu", "on nvme", "read/step", "written/step", "TB/day"):
        assert heading in done.stdout


WITHOUT_END = [*TINY, "zero=stage3", "offload=nvme_params", "trainer.max_steps=100000"]


def training(train: Command, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A run that has made two steps, and its mark."""
    known = set(train.runs("runs/train/*"))
    process = train.start(*WITHOUT_END, *words)
    (run,) = wait_until(lambda: set(train.runs("runs/train/*")) - known, 120, "run directory")
    wait_for_rows(run, 2)
    assert swap_files(train)
    return process, str(read(run / "launch" / "launch.json")["run_id"])


def test_a_killed_rank_leaves_no_swap_files(train: Command) -> None:
    process, run_id = training(train, "trainer.devices=2")
    ranks = [p for p in procfs.marked(run_id) if procfs.environment_value(p, "RANK") == "1"]
    os.kill(ranks[0], signal.SIGKILL)
    process.communicate(timeout=100)
    assert process.returncode == 1
    assert swap_files(train) == []


def test_the_next_start_removes_what_a_killed_run_left_and_ctrl_c_leaves_nothing(
    train: Command,
) -> None:
    process, run_id = training(train, "trainer.devices=2")
    process.kill()
    process.communicate(timeout=100)
    wait_until(lambda: not procfs.marked(run_id), 20, "end of all processes")
    assert len([path for path in swap_files(train) if path.is_dir()]) == 2
    process, _ = training(train)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert out.count("removed 2 folders of swap files") == 1
    assert swap_files(train) == []


def test_a_disk_that_is_too_small_is_said_before_the_first_step(
    train: Command, disk_of: Callable[[int], Path]
) -> None:
    """NV-01."""
    disk = disk_of(300 << 10)  # 20 bytes per parameter are 520 KiB
    words = [*TINY, "zero=stage3", "offload=nvme_params", f"offload.nvme.dir={disk}"]
    refused = train(*words, "tag=refused")
    (path,) = train.runs("runs/train/*refused/status.json")
    assert refused.returncode == 1 and read(path)["status"] == "wont_fit"
    assert "Swap files take" in refused.stdout and "300.00 KiB are free" in refused.stdout
    done = train(*words, "tag=tried", "launch.guard=off")
    (path,) = train.runs("runs/train/*tried/status.json")
    status = read(path)
    assert done.returncode == 1 and (status["status"], status["failed_rank"]) == ("crash", 0)
    assert "No space left on device" in status["reason"] and str(disk) in status["reason"]
    assert list(disk.iterdir()) == []


@pytest.mark.full
def test_a_model_that_was_built_whole_moves_to_the_disk(train: Command) -> None:
    """NV-04: a LightningModule that makes its layers in __init__."""
    shutil.copy(HERE / "faulty.py", train.where)
    tiny = [word for word in TINY if not word.startswith(("model.", "trainer.val"))]
    words = ["model=external", "model.target=faulty:Faulty", "zero=stage3", "offload=nvme_params"]
    done = train(*tiny, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = train.runs("runs/train/*/result.json")
    result = read(path)
    # embedding and head of 64 tokens, 16 wide, and the head's bias: 20 bytes each
    assert sum(kind["nvme"] for kind in result["state_bytes"]["0"].values()) >= 20 * 2112
    assert result["loss_last"] is not None and result["io_bytes_per_step"]["0"]["read"] > 0
    assert swap_files(train) == []


# One sequence a step, so that activations are small beside the state; nothing has to be known of
# all gradients before a unit is stepped. Embeddings are small: all of the model is in its blocks.
LARGE = [
    "zero=stage3",
    "data=synthetic",
    "model.vocab_size=64",
    "data.seq_len=16",
    "data.batch_size=1",
    "trainer.max_steps=2",
    "trainer.val_batches=0",
    "trainer.gradient_clip_val=null",
    "precision=fp32",
    "logger=jsonl",
]


def train_in_less_memory_than_the_state_takes(
    train: Command, group: Path, limit: int, layers: int, dim: int, times: float
) -> None:
    """Driver, agent and rank together may use ``limit`` bytes; the state without offload (16 bytes
    per parameter: fp32 with two moments) takes ``times`` as much."""
    elements = layers * (12 * dim * dim + 2 * dim) + 64 * dim + dim
    assert 16 * elements >= times * limit
    words = [*LARGE, f"model.layers={layers}", f"model.dim={dim}", f"model.heads={dim // 64}"]
    done = train(*words, "offload=nvme_params", "tag=disk", within=group, seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = train.runs("runs/train/*disk/result.json")
    result = read(path)
    assert (result["status"], result["steps"]) == ("ok", 2)
    assert result["peak_rss_bytes"]["0"] < limit
    state = result["state_bytes"]["0"]
    # and what is stepped is a copy in the records on disk
    assert sum(kind["nvme"] for kind in state.values()) >= 20 * elements
    assert swap_files(train) == []

    # all of it in memory: refused, and killed by the kernel if it is tried anyway
    said = train(*words, "tag=refused", within=group)
    assert said.returncode == 1 and "offload=nvme_params" in said.stdout
    (path,) = train.runs("runs/train/*refused/status.json")
    assert read(path)["status"] == "wont_fit"
    done = train(*words, "launch.guard=off", "tag=memory", within=group, seconds=900)
    assert done.returncode == 1
    (path,) = train.runs("runs/train/*memory/status.json")
    status = read(path)
    assert (status["status"], status["failed_rank"]) == ("oom", 0), status


def test_a_model_whose_state_is_larger_than_the_memory_trains(
    train: Command, limited: Callable[[int], Path]
) -> None:
    # Python, torch and Lightning take more than half of a GiB: a smaller limit is none of the
    # model's.
    limit = 1 << 30
    train_in_less_memory_than_the_state_takes(train, limited(limit), limit, 28, 512, times=1.3)


@pytest.mark.full
def test_a_model_of_three_times_the_memory_trains(
    train: Command, limited: Callable[[int], Path]
) -> None:
    limit = 2 << 30
    train_in_less_memory_than_the_state_takes(train, limited(limit), limit, 32, 1024, times=3)
