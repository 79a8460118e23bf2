"""Run directories: exclusive, safely named, and nothing left behind when they cannot be made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zeroexp.errors import ConfigError
from zeroexp.run.directory import RunDirectory, safe_name


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, "exp", "tag", now=0.0)
    second = RunDirectory.create(tmp_path, "exp", "tag", now=0.0)
    assert first.path.parent == second.path.parent == tmp_path / "exp"
    assert second.path.name == first.path.name + "-2"
    assert re.fullmatch(r"\d{8}-\d{6}-tag", first.path.name)


def test_directories_made_at_once_are_all_different(tmp_path: Path) -> None:
    made: list[Path] = []
    start = threading.Barrier(16)

    def make() -> None:
        start.wait()
        made.append(RunDirectory.create(tmp_path, "exp", "tag", now=0.0).path)

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 16
    assert set(made) == set((tmp_path / "exp").iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "a=[1,2]",
        "data.path=x/y/z",
        "name='50%'",
        ",".join(f"key{i}=value{i}" for i in range(60)),
        "../../etc",
        "ü=ß",
        "a\nb",
    ],
)
def test_names_are_one_safe_component(text: str) -> None:
    name = safe_name(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)
    assert len(name.encode()) <= 64


def test_names_that_read_alike_stay_apart() -> None:
    assert safe_name("path=a/b") != safe_name("path=a b")
    long = "x" * 200
    assert safe_name(long + "1") != safe_name(long + "2")
    assert safe_name("zero=stage3,trainer.devices=2") == "zero-stage3_trainer.devices-2"


def test_a_file_in_the_way_is_one_message_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a directory")
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(tmp_path / "runs", "exp", "tag")
    assert [problem.key for problem in caught.value.problems] == ["paths.runs"]
    assert "Not a directory" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_full_or_read_only_file_system_leaves_no_directory(tmp_path: Path) -> None:
    # A file-size limit of 0 makes every write fail, for root too, whom permissions do not stop.
    code = """
import resource, sys
from pathlib import Path
from zeroexp.errors import ConfigError
from zeroexp.run.directory import RunDirectory
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    RunDirectory.create(Path(sys.argv[1]) / "deep" / "runs", "exp", "tag")
except ConfigError as error:
    sys.exit(error.exit_code)
"""
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, env=environ)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
