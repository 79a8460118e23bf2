"""status.json, and how a run reads whose driver is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeroexp.run import status
from zeroexp.run.atomic import read_json, write_json
from zeroexp.run.directory import RunDirectory


def test_a_live_driver_reads_running_and_a_dead_one_interrupted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    status.running().write(directory)
    found = status.read(directory)
    assert found is not None and found.status == "running"
    code = (
        "import sys; from pathlib import Path; from zeroexp.run import status;"
        "from zeroexp.run.directory import RunDirectory;"
        "status.running().write(RunDirectory(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    found = status.read(directory)
    assert found is not None and found.status == "interrupted"


def test_another_machine_is_believed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    status.running().write(directory)
    written = read_json(directory.status)
    assert written is not None
    written["driver"] = {"pid": 1, "start_ticks": -1, "host": "elsewhere.example"}
    write_json(directory.status, written)
    found = status.read(directory)
    assert found is not None and found.status == "running"


def test_exit_codes() -> None:
    codes = {name: status.Status(name).exit_code for name in status.CLASSES}
    assert codes == {
        "running": 0,
        "ok": 0,
        "oom": 1,
        "timeout": 1,
        "nan": 1,
        "crash": 1,
        "wont_fit": 1,
        "config": 2,
        "interrupted": 130,
    }
    with pytest.raises(ValueError, match="no status class"):
        status.Status("fine")


def test_missing_or_foreign_file_is_no_status(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert status.read(directory) is None
    directory.status.write_text('{"status": "fine"}')
    assert status.read(directory) is None
