"""The folder of the swap files, as the driver sees it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroexp.config import Config
from zeroexp.run.swap import swap_folder, sweep_after, sweep_before
from zeroexp.scratch import ScratchFolder

HOLD = """
import sys, time
from pathlib import Path
from zeroexp.scratch import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]), sys.argv[2])
(folder.path / "a.swap").write_bytes(bytes(2048))
print(folder.path, flush=True)
time.sleep(600)
"""


def config(folder: Path, kind: str = "nvme") -> Config:
    return Config.from_mapping({"offload": kind, "offload.nvme.dir": str(folder)}).resolved()


def holder(folder: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder of swap files."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def test_what_dead_processes_left_is_said_once_and_the_living_keep_theirs(tmp_path: Path) -> None:
    dead, gone = holder(tmp_path, "rank0")
    live, kept = holder(tmp_path, "rank1")
    try:
        end(dead)
        assert gone.is_dir()
        assert sweep_before(config(tmp_path)) == [
            f"removed 1 folder of swap files (2.00 KiB) that dead processes left in {tmp_path}"
        ]
        assert not gone.exists() and (kept / "a.swap").is_file()
        assert sweep_before(config(tmp_path)) == []
    finally:
        end(live)


def test_after_a_failure_dying_ranks_are_waited_for(tmp_path: Path) -> None:
    process, folder = holder(tmp_path, "rank0")
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({process.pid}, 9)"]
    )
    try:
        sweep_after(config(tmp_path), failed=True)
        assert not folder.exists()
    finally:
        end(process)
        killer.wait(timeout=30)


def test_after_a_good_run_nobody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr(time, "sleep", sleep)
    with ScratchFolder(tmp_path, "other") as other:
        sweep_after(config(tmp_path), failed=False)
        assert other.path.is_dir()


def test_a_run_without_swap_files_touches_nothing(tmp_path: Path) -> None:
    process, folder = holder(tmp_path / "swap", "rank0")
    end(process)
    for kind in ("none", "cpu", "cpu_params"):
        still = Config.from_mapping({"offload": kind, "paths.runs": str(tmp_path)}).resolved()
        assert swap_folder(still) is None and sweep_before(still) == []
        sweep_after(still, failed=True)
    assert folder.is_dir()
    missing = tmp_path / "missing"
    assert sweep_before(config(missing)) == [] and not missing.exists()
