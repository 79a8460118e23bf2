"""What the peers' environment needs from the system, and how it is said where it cannot be had."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import libaio, peer_env


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands before those of the system; its compiler links with nothing."""
    folder = tmp_path / "bin"
    script(folder, "cc", "exit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    return folder


def test_an_answer_of_apt_is_the_reason(tools: Path, tmp_path: Path) -> None:
    script(tools, "apt-get", "echo 'W: first' >&2; echo 'E: no network' >&2; exit 100")
    script(tools, "dpkg-deb", "exit 0")
    with pytest.raises(libaio.Missing, match=r"^libaio: apt-get update: no network$"):
        libaio.make(tmp_path / "libaio")


def test_what_does_not_link_is_missing(tools: Path, tmp_path: Path) -> None:
    script(tools, "apt-get", "exit 0")
    script(tools, "dpkg-deb", "exit 0")
    with pytest.raises(libaio.Missing, match="does not link"):
        libaio.make(tmp_path / "libaio")


def test_without_apt_the_tool_is_named(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(libaio.Missing, match="no apt-get"):
        libaio.make(tmp_path / "libaio")


def test_what_was_unpacked_is_found_before_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert libaio.variables(tmp_path) == {}
    place = tmp_path / "usr" / "lib" / "some-linux-gnu"
    place.mkdir(parents=True)
    (place / "libaio.so").touch()
    monkeypatch.setenv("LIBRARY_PATH", "/other")
    monkeypatch.delenv("CPATH", raising=False)
    found = libaio.variables(tmp_path)
    assert found["LIBRARY_PATH"] == f"{place}:/other"
    assert found["CPATH"] == str(tmp_path / "usr" / "include")


def test_the_peers_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(folder: Path) -> None:
        raise libaio.Missing("libaio: no network")

    monkeypatch.setattr(peer_env, "exists", lambda: True)
    monkeypatch.setattr(libaio, "make", fail)
    monkeypatch.setattr(peer_env, "EXTENSIONS", tmp_path)
    monkeypatch.setattr(peer_env, "PYTHON", Path("/bin/true"))
    (tmp_path / "async_io").mkdir()
    lock = tmp_path / "async_io" / "lock"
    lock.touch()
    peer_env.make()
    assert not lock.exists()
    assert capsys.readouterr().out == "missing: libaio: no network\n"


def test_commands_of_the_environment_come_first() -> None:
    path = peer_env.variables()["PATH"].split(":")
    assert path[0] == str(peer_env.FOLDER / "bin")
    assert subprocess.run(["true"], env=peer_env.variables(), check=False).returncode == 0
