from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

from zeroexp.cli import main
from zeroexp.ops.native import select
from zeroexp.report.doctor import examine
from zeroexp.run import disk
from zeroexp.run.disk import DiskRate, best_rate, file_system_of, probe
from zeroexp.tiers import File, backend

MIB = 1 << 20


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every write that is asked for."""
    sizes: list[int] = []
    write = File.write

    def counted(file: File, buffer: Tensor, offset: int = 0) -> None:
        sizes.append(buffer.numel() * buffer.element_size())
        write(file, buffer, offset)

    monkeypatch.setattr(File, "write", counted)
    return sizes


def value(page: str, name: str) -> str:
    line = next(line for line in page.splitlines() if line.startswith(f"{name}  "))
    return line.removeprefix(name).strip()


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, written: list[int]) -> None:
    found = probe(tmp_path)
    assert not found.problem and found.engine is not None
    assert found.free_bytes > 0
    settings = [(rate.block_size, rate.queue_depth) for rate in found.rates]
    assert settings == [(b, d) for b in disk.BLOCK_SIZES for d in disk.QUEUE_DEPTHS]
    assert all(rate.read > 0 and rate.write > 0 for rate in found.rates)
    assert found.recommended in found.rates
    assert 9 * 24 * MIB <= sum(written) <= 256 * MIB
    assert list(tmp_path.iterdir()) == []


def test_no_setting_is_begun_after_the_time_is_over(tmp_path: Path, written: list[int]) -> None:
    found = probe(tmp_path, seconds=-1)
    assert found.rates == () and found.recommended is None and written == []
    assert found.engine is not None, "what needs no measurement is said all the same"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert list(tmp_path.iterdir()) == [], "the file has lost its name before the first byte"
        raise KeyboardInterrupt

    monkeypatch.setattr(File, "write", interrupt)
    before = len(os.listdir("/proc/self/fd"))
    assert main(["doctor", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_type_of_a_file_system(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    by_df = subprocess.run(
        ["df", "--output=fstype", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert file_system_of(tmp_path) == by_df.stdout.split()[-1]


def test_of_settings_that_are_as_good_the_smallest_is_taken() -> None:
    slow = DiskRate(1 * MIB, 1, read=1e9, write=1e9)
    small = DiskRate(2 * MIB, 4, read=3e9, write=2.8e9)
    best = DiskRate(8 * MIB, 16, read=3.1e9, write=3e9)
    assert best_rate([best, slow, small]) == small
    assert best_rate([best, slow]) == best
    assert best_rate([]) is None
    # 1 GB read in 1 s and 1 GB written in 1/3 s are 2 GB in 4/3 s
    assert DiskRate(1, 1, read=1e9, write=3e9).both == pytest.approx(1.5e9)


def test_the_page_names_everything_with_its_unit(tmp_path: Path) -> None:
    page = examine(tmp_path)
    assert value(page, "directory") == str(tmp_path)
    assert value(page, "file system").startswith(file_system_of(tmp_path))
    assert value(page, "direct I/O").startswith(("yes", "! no: "))
    assert value(page, "io_uring").startswith(("yes (", "! no ("))
    assert value(page, "huge pages").split()[0] in ("always", "madvise", "!")
    lines = page.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("disk rates"))
    for column in ("block size", "queue depth", "read (GB/s)", "write (GB/s)"):
        assert column in lines[head]
    sizes = [" ".join(line.split()[:3]) for line in lines[head + 1 : head + 10]]
    units = ("512.00 KiB", "2.00 MiB", "8.00 MiB")
    assert sizes == [f"{unit} {depth}" for unit in units for depth in (1, 4, 16)]
    keys = dict(word.split("=") for word in value(page, "recommended").split())
    assert keys.pop("offload.nvme.engine") in ("io_uring", "threads")
    assert keys.pop("offload.nvme.block_size") in ("512KiB", "2MiB", "8MiB")
    assert keys.pop("offload.nvme.dir") == str(tmp_path)
    assert list(keys) in (["offload.nvme.queue_depth"], ["offload.nvme.threads"])


def test_transfers_through_the_page_cache_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "native", lambda: select("reference"))
    page = examine(tmp_path)
    assert value(page, "direct I/O").startswith("! no: the engine in Python has no direct")
    assert value(page, "direct I/O").endswith("the rates below are those of the page cache")
    assert value(page, "io_uring").startswith("! no (ZEROEXP_ISA=reference")
    assert value(page, "recommended").startswith("offload.nvme.engine=threads ")
    assert " offload.nvme.threads=" in value(page, "recommended")


def test_where_nothing_can_be_written_the_page_says_so() -> None:
    page = examine(Path("/proc"))
    assert value(page, "file system").startswith("proc, ")
    assert value(page, "swap files").startswith("! cannot create /proc/.zeroexp-doctor-")
    assert "recommended" not in page


def test_the_directory_of_the_runs_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    line = value(capsys.readouterr().out, "directory")
    assert line == f"runs (not there yet; probed: {tmp_path})"
    (tmp_path / "runs").mkdir()
    assert main(["doctor"]) == 0
    assert value(capsys.readouterr().out, "directory") == "runs"


def test_directories_that_do_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert f"there is no directory {tmp_path}/none" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "other"]) == 2
    assert "doctor probes one directory" in capsys.readouterr().err
