"""The file engine's benchmark at a small size: who ran, who could not, and what is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fio, io, peer_env, targets
from benchmarks.contender import Unavailable, contender
from benchmarks.timings import Timings
from zeroexp.ops.native import select
from zeroexp.tiers import FileEngine, backend

MIB = 1 << 20


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_env, "PYTHON", tmp_path / "none" / "python")


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)


@pytest.fixture
def direct(tmp_path: Path) -> None:
    with FileEngine() as engine, engine.create(tmp_path / "probe", 1) as file:
        if not file.direct or engine.status().engine != "io_uring":
            pytest.skip(str(engine.status()))
    (tmp_path / "probe").unlink()


def test_all_take_turns_and_nothing_is_left(
    no_peers: None, no_fio: None, direct: None, tmp_path: Path
) -> None:
    timings = Timings(io.measure(rounds=2, folder=tmp_path, num_bytes=8 * MIB))
    assert list(timings.cases) == ["read", "write"]
    for case in timings.cases:
        for variant in (io.OURS, "zeroexp threads", "zeroexp io_uring, caller's tensor"):
            samples = timings.samples(case, variant)
            assert samples is not None and len(samples) == 2 and min(samples) > 0
        missing = [v for v in timings.cases[case]["samples"].values() if isinstance(v, str)]
        assert missing.count("not installed: python -m benchmarks peers") == 4
        assert missing.count("not installed: fio") == 2
        if len(missing) == 6:  # there is a compiler
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
    no_peers: None, no_fio: None, direct: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = io.measure(rounds=1, folder=tmp_path, num_bytes=MIB)
    assert found["cases"][0]["samples"][io.LIMIT] == "no C++ compiler: no-such-compiler"


def test_a_process_that_fails_is_missing_with_its_last_words(tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho first >&2\necho 'libaio is not there' >&2\nexit 1\n")
    failing.chmod(0o755)
    with (
        pytest.raises(Unavailable, match=r"^libaio is not there$"),
        contender([str(failing)], {}, ready=True),
    ):
        pass


def test_fio_counts_all_loops_in_milliseconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """400 ms for four passes; notes may come before the report."""
    program = tmp_path / "fio"
    report = '{"jobs": [{"read": {"runtime": 400}, "write": {"runtime": 800}}]}'
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho note\necho '{report}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(fio.shutil, "which", lambda name: str(program))
    with fio.passes(fio.Job(tmp_path / "file", 64 * MIB, MIB, 4)) as run:
        assert (run("read"), run("write")) == (0.1, 0.2)
    asked = (tmp_path / "asked").read_text()
    assert "--rw=write" in asked and "--direct=1" in asked and f"--bs={MIB}" in asked


def test_fio_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho 'engine io_uring not loadable' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(fio.shutil, "which", lambda name: str(program))
    job = fio.Job(tmp_path / "file", MIB, MIB, 4)
    with pytest.raises(Unavailable, match="not loadable"), fio.passes(job):
        pass


def test_targets_of_the_file_engine() -> None:
    # Reads in 100 ms against 96 of the best other (0.96 of its speed), and a peer of 120 (1.2x);
    # writes against a fio of 90, the fastest there.
    read = {io.OURS: [100.0], io.LIMIT: [96.0], io.PEER: [120.0], io.FIO: [97.0]}
    write = {io.OURS: [100.0], io.LIMIT: [99.0], io.PEER: "no libaio", io.FIO: [90.0]}
    cases = [{"name": "read", "samples": read}, {"name": "write", "samples": write}]
    verdicts = targets.file_engine(Timings({"cases": cases}))
    assert [v.status for v in verdicts] == ["met", "not met", "met", "missing"]
    assert [v.measured for v in verdicts[:2]] == [
        "0.960 (0.960..0.960) of io_uring loop",
        "0.900 (0.900..0.900) of fio",
    ]
    assert [v.status for v in targets.file_engine(None)] == ["missing"] * 4


def test_without_the_bare_loop_the_limit_is_missing() -> None:
    samples = {io.OURS: [100.0], io.LIMIT: "no C++ compiler", io.FIO: [97.0]}
    cases = [{"name": name, "samples": samples} for name in ("read", "write")]
    verdicts = targets.file_engine(Timings({"cases": cases}))
    assert [v.status for v in verdicts] == ["missing"] * 4
