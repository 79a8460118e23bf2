"""Last words on a full disk: where they find room, and what they say when there is none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from zeroexp.run import atomic, failure, fault, reserve
from zeroexp.run.directory import RunDirectory
from zeroexp.run.record import MetricsWriter


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def full(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no file while the reserve is there."""

    def replace(source: Any, target: Any) -> None:
        if directory.reserve.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(source, target)

    monkeypatch.setattr(atomic.os, "replace", replace)


def test_the_reserve_is_written_not_promised(directory: RunDirectory) -> None:
    reserve.keep(directory)
    found = directory.reserve.stat()
    assert found.st_size == reserve.RESERVE_BYTES == 65536
    reserve.give_up(directory)
    reserve.give_up(directory)  # by another process before
    assert not directory.reserve.exists()


def test_last_words_take_the_reserve_and_nothing_else_does(
    directory: RunDirectory, full: None
) -> None:
    reserve.keep(directory)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_json(directory.run, {"a": 1})
    assert directory.reserve.exists()
    fault.record(directory, 0, ValueError("boom"))
    assert json.loads(directory.error(0).read_text())["message"] == "boom"
    assert not directory.reserve.exists()


def test_other_errors_leave_the_reserve_alone(directory: RunDirectory) -> None:
    reserve.keep(directory)
    with pytest.raises(FileNotFoundError):
        reserve.write_last(directory, directory.path / "nowhere" / "x.json", {})
    assert directory.reserve.exists()


def test_a_write_that_found_no_room_says_where(directory: RunDirectory, full: None) -> None:
    reserve.keep(directory)
    with pytest.raises(OSError, match="No space left on device") as caught:
        atomic.write_json(directory.run, {"a": 1})
    assert caught.value.filename == str(directory.run)
    assert fault.said(caught.value, directory) == f"No space left on device: {directory.run}"
    nameless = OSError(errno.ENOSPC, "No space left on device")
    assert fault.said(nameless, directory) == f"No space left on device: {directory.path}"
    assert fault.said(ValueError("boom"), directory) == "boom"


def test_the_first_error_is_told_when_another_write_failed_on_the_way(
    directory: RunDirectory,
) -> None:
    first = OSError(errno.ENOSPC, "No space left on device", "step-2.ckpt")
    try:
        try:
            raise first
        except OSError:
            raise RuntimeError("while cleaning up")  # noqa: B904 (as interpreters chain it)
    except RuntimeError as error:
        assert fault.said(error, directory) == "No space left on device: step-2.ckpt"


def test_a_metrics_row_that_found_no_room_names_its_file(directory: RunDirectory) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    directory.metrics.symlink_to("/dev/full")
    rows = MetricsWriter.__new__(MetricsWriter)
    rows._file = open(directory.metrics, "w", buffering=1)  # noqa: SIM115 (closed below)
    with pytest.raises(OSError, match="No space left") as caught:
        rows.append({"step": 1})
    assert caught.value.filename == str(directory.metrics)
    rows.close()


def test_ranks_without_a_word_on_a_full_disk(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.launch.mkdir()
    monkeypatch.setattr(failure, "no_room", lambda directory: True)
    found = failure.verdict(directory, agent_code=1, oom_kills=0)
    assert found.reason.startswith(f"the disk of {directory.path} is full")
    ends = [{"rank": 1, "pid": 9, "exit_code": 1, "time": 1.0}]
    directory.exits.write_text(json.dumps({"exits": ends}))
    found = failure.verdict(directory, agent_code=1, oom_kills=0)
    assert found.reason.endswith(f"the disk of {directory.path} is full")
    assert found.failed_rank == 1
