"""The file engine's benchmark at a small size: who ran, who could not, and what is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import io, peer_env, targets
from benchmarks.timings import Timings
from zeroexp.ops.native import select
from zeroexp.tiers import FileEngine, backend

MIB = 1 << 20


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_env, "PYTHON", tmp_path / "none" / "python")


@pytest.fixture
def direct(tmp_path: Path) -> None:
    with FileEngine() as engine, engine.create(tmp_path / "probe", 1) as file:
        if not file.direct or engine.status().engine != "io_uring":
            pytest.skip(str(engine.status()))
    (tmp_path / "probe").unlink()


def test_all_take_turns_and_nothing_is_left(no_peers: None, direct: None, tmp_path: Path) -> None:
    timings = Timings(io.measure(rounds=2, folder=tmp_path, num_bytes=8 * MIB))
    assert list(timings.cases) == ["read", "write"]
    for case in timings.cases:
        for variant in (io.OURS, "zeroexp threads", "zeroexp io_uring, caller's tensor"):
            samples = timings.samples(case, variant)
            assert samples is not None and len(samples) == 2 and min(samples) > 0
        missing = [v for v in timings.cases[case]["samples"].values() if isinstance(v, str)]
        assert len(missing) == (4 if shutil.which("c++") else 5)
        assert missing[-1] == "not installed: python -m benchmarks peers"
        if shutil.which("c++"):
            limit = timings.samples(case, io.LIMIT)
            each = [timings.samples(case, f"{io.LIMIT}, {s} MiB x 4") or [] for s in (2, 8)]
            assert limit == [min(pair) for pair in zip(*each, strict=True)]
    assert list(tmp_path.iterdir()) == []


def test_without_direct_transfers_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "native", lambda: select("reference"))
    with pytest.raises(SystemExit, match=r"skipped: .*no direct transfers"):
        io.measure(rounds=1, folder=tmp_path, num_bytes=MIB)
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_the_limit_is_missing(
    no_peers: None, direct: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = io.measure(rounds=1, folder=tmp_path, num_bytes=MIB)
    assert found["cases"][0]["samples"][io.LIMIT] == "no C++ compiler: no-such-compiler"


def test_a_process_that_fails_is_missing_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho first >&2\necho 'libaio is not there' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(peer_env, "PYTHON", failing)
    with (
        pytest.raises(io.Unavailable, match=r"^libaio is not there$"),
        io._process([str(failing)], ready=True),
    ):
        pass


def test_targets_of_the_file_engine() -> None:
    # reads in 100 ms against a limit of 96 (0.96 of its speed) and a peer of 120 (1.2x)
    read = {io.OURS: [100.0], io.LIMIT: [96.0], io.PEER: [120.0]}
    write = {io.OURS: [100.0], io.LIMIT: [90.0], io.PEER: "no libaio"}
    cases = [{"name": "read", "samples": read}, {"name": "write", "samples": write}]
    verdicts = targets.file_engine(Timings({"cases": cases}))
    assert [v.status for v in verdicts] == ["met", "not met", "met", "missing"]
    assert [v.status for v in targets.file_engine(None)] == ["missing"] * 4
