"""A folder to write in: what is found out about it, and with which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroexp.errors import ConfigError
from zeroexp.folder import check_writable, existing, free_bytes


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_writable(path, "offload.nvme.dir")
    (only,) = caught.value.problems
    assert only.key == "offload.nvme.dir"
    return f"{only.problem} {only.fix}"


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "offload.nvme.dir")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "b"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/proc/x", "No such file or directory"), ("file", "Not a directory"), ("file/x", "Not a")],
)
def test_what_cannot_be_written_is_named_with_the_reason(
    path: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    where = tmp_path / path
    said = problem(where)
    assert f"cannot write to {where}: {reason}" in said
    assert "Point offload.nvme.dir at a directory you can write" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "Permission denied" in problem(tmp_path)
    assert "Permission denied" in problem(tmp_path / "x" / "y")
    tmp_path.chmod(0o755)


def test_a_full_disk_is_found_and_what_was_made_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("zeroexp.folder.tempfile.NamedTemporaryFile", refuse)
    assert "No space left on device" in problem(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_free_bytes_are_those_of_the_file_system_the_folder_will_be_on(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    found = os.statvfs(tmp_path)
    free = free_bytes(tmp_path / "a" / "b")
    assert free is not None and free % found.f_frsize == 0
    assert 0 < free <= found.f_blocks * found.f_frsize
