"""Atomic files: a failed write leaves the old content, JSON is strict."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from zeroexp.run import atomic


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    atomic.write_text(path, "old")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_json_has_string_keys_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic.write_json(path, {0: math.nan, "a": [math.inf, 1.5], "b": {1: -math.inf}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    loaded = json.loads(path.read_text(), parse_constant=refuse)
    assert loaded == {"0": None, "a": [None, 1.5], "b": {"1": None}}


def test_reading_what_is_missing_or_broken_gives_none(tmp_path: Path) -> None:
    assert atomic.read_json(tmp_path / "none.json") is None
    (tmp_path / "half.json").write_text('{"a": ')
    assert atomic.read_json(tmp_path / "half.json") is None
    (tmp_path / "list.json").write_text("[1]")
    assert atomic.read_json(tmp_path / "list.json") is None
