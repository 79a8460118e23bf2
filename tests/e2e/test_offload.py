"""``offload=…`` as a user starts it: figures, files that are gone afterwards however a run ends, and
models that are larger than the memory they may use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
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
    words = ["offload=nvme_params", "trainer.devices=2", "logger.kinds=[tensorboard]"]
    done = train(*TINY, "zero=stage3", *words)
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
        assert io["steps"] == 3  # one of warm-up
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


def test_a_sweep_over_the_kinds_of_offload(train: Command) -> None:
    kinds = ("none", "cpu", "nvme", "cpu_params", "nvme_params")
    done = train("-m", *TINY, "zero=stage3", f"offload={','.join(kinds)}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert swap_files(train) == []
    results = {}
    for path in train.runs("runs/*/*-sweep/*/result.json"):
        result = read(path)
        state = result["state_bytes"]["0"]
        tiers = {t: sum(kind[t] for kind in state.values()) for t in ("device", "cpu", "nvme")}
        results[frozenset(t for t, size in tiers.items() if size)] = result
    assert set(results) == {
        frozenset(tiers)
        for tiers in (["device"], ["device", "cpu"], ["device", "cpu", "nvme"], ["cpu"], ["nvme"])
    }
    # where state lives changes nothing else
    assert len({(r["loss_first"], r["loss_last"], r["val_loss"]) for r in results.values()}) == 1
    assert {bool(r["io_bytes_per_step"]["0"]["read"]) for r in results.values()} == {True, False}
    for heading in ("on nvme", "read/step", "written/step", "TB/day"):
        assert heading in done.stdout


@pytest.mark.parametrize("end", ["ctrl-c", "a rank", "all"])
def test_nothing_stays_on_the_disk_however_a_run_ends(train: Command, end: str) -> None:
    words = [*TINY, "zero=stage3", "offload=nvme_params"]
    process = train.start(*words, "trainer.devices=2", "trainer.max_steps=100000")
    log = wait_until(lambda: train.runs("runs/train/*/rank0.log"), 120, "rank0.log")[0]
    wait_for_rows(log.parent, 2)
    run_id = read(log.parent / "launch" / "launch.json")["run_id"]
    assert swap_files(train)
    if end == "ctrl-c":
        process.send_signal(signal.SIGINT)
    elif end == "all":
        process.kill()
    else:
        ranks = [p for p in procfs.marked(run_id) if procfs.environment_value(p, "RANK") == "1"]
        os.kill(ranks[0], signal.SIGKILL)
    process.communicate(timeout=100)
    wait_until(lambda: not procfs.marked(run_id), 20, "end of all processes")
    if end != "all":
        assert swap_files(train) == []
        return
    assert len([p for p in swap_files(train) if p.is_dir()]) == 2
    again = train(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("removed 2 folders of swap files") == 1
    assert swap_files(train) == []
