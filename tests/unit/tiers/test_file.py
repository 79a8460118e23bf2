"""Transfers between tensors and files, with every engine; files are looked at with open()."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.tiers.conftest import Make
from zeroexp.errors import FileError, ZeroexpError
from zeroexp.ops import HostRange
from zeroexp.tiers import FileEngine, backend

SIZES = [0, 1, 127, 128, 129, 4095, 4096, 4097, 262145]


def random_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_round_trip(make: Make, tmp_path: Path, size: int) -> None:
    engine = make()
    memory = HostRange(size + 5000)
    for shift in (0, 1, 64, 4097):
        for offset in (0, 1, 4096, 5000):
            source = memory.tensor(torch.uint8, size, shift).copy_(random_bytes(size, shift))
            with engine.create(tmp_path / "f", offset + size + 3) as file:
                file.write(source, offset)
                expected = bytes(offset) + bytes(source.tolist()) + bytes(3)
                assert (tmp_path / "f").read_bytes() == expected
                assert file.num_bytes == len(expected)
                out = torch.full((size + 2,), 7, dtype=torch.uint8)
                file.read(out[1:-1], offset)
                assert out[1:-1].equal(source) and out[0] == 7 and out[-1] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool])
def test_any_dtype_and_shape(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    source = random_bytes(1200).view(4, 300).gt(99) if dtype == torch.bool else torch.empty(0)
    if dtype != torch.bool:
        source = torch.linspace(-3, 3, 1200).view(4, 300).to(dtype)
    out = torch.zeros(4, 300, dtype=dtype)
    with make().create(tmp_path / "f", source.numel() * source.element_size()) as file:
        file.write(source)
        file.read(out)
    assert out.equal(source)
    raw = torch.frombuffer(bytearray((tmp_path / "f").read_bytes()), dtype=dtype)
    assert raw.view(4, 300).equal(source)


def test_many_requests_at_once(make: Make, tmp_path: Path) -> None:
    engine = make()
    file = engine.create(tmp_path / "f", 40 * 5000)
    parts = [random_bytes(5000, i) for i in range(40)]
    transfers = [file.submit_write(part, i * 5000) for i, part in enumerate(parts)]
    for transfer in reversed(transfers):
        transfer.wait()
        transfer.wait()
        assert transfer.over
    assert (tmp_path / "f").read_bytes() == bytes(torch.cat(parts).tolist())
    outs = [torch.zeros(5000, dtype=torch.uint8) for _ in parts]
    for i, out in enumerate(outs):
        file.submit_read(out, i * 5000)
    engine.flush()
    for out, part in zip(outs, parts, strict=True):
        assert out.equal(part)


def test_a_buffer_lives_until_its_request_was_waited_for(make: Make, tmp_path: Path) -> None:
    engine = make()
    buffer = random_bytes(100_000)
    expected = bytes(buffer.tolist())
    alive = weakref.ref(buffer)
    transfer = engine.create(tmp_path / "f", 100_000).submit_write(buffer)
    del buffer
    gc.collect()
    assert alive() is not None
    transfer.wait()
    gc.collect()
    assert alive() is None
    assert (tmp_path / "f").read_bytes() == expected


def test_a_full_disk_is_an_error_of_that_write(make: Make, tmp_path: Path) -> None:
    engine = make()
    full = engine.open("/dev/full", writable=True)
    transfer = full.submit_write(torch.zeros(20_000))
    for _ in range(2):
        with pytest.raises(FileError) as caught:
            transfer.wait()
        error = caught.value
        assert isinstance(error, OSError) and isinstance(error, ZeroexpError)
        assert error.errno == errno.ENOSPC and error.filename == "/dev/full"
        assert (error.wanted, error.done) == (80_000, 0)
        text = str(error)
        assert text.startswith("write of 80000 bytes at byte 0 of /dev/full failed at byte ")
        assert "0 bytes done: No space left on device (ENOSPC)" in text
        assert text.endswith("free space there, or use a directory on another file system")
    with engine.create(tmp_path / "f", 3) as file:  # the engine goes on
        file.write(random_bytes(3))


def test_flush_waits_for_all_and_raises_the_first(make: Make, tmp_path: Path) -> None:
    engine = make()
    good = engine.create(tmp_path / "f", 100_000)
    full = engine.open("/dev/full", writable=True)
    data = random_bytes(100_000)
    full.submit_write(data[:10])
    full.submit_write(data[:20])
    good.submit_write(data)
    with pytest.raises(FileError, match="write of 10 bytes"):
        engine.flush()
    assert (tmp_path / "f").read_bytes() == bytes(data.tolist())
    engine.flush()


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000])
def test_a_file_that_ends_early_is_an_error(make: Make, tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(bytes(size))
    file = make().open(tmp_path / "f")
    with pytest.raises(FileError, match="the file ends there") as caught:
        file.read(torch.zeros(30_000, dtype=torch.uint8))
    error = caught.value
    assert error.errno == errno.ENODATA
    assert error.wanted == 30_000 and error.done <= size <= error.offset


def test_what_cannot_be_opened(make: Make, tmp_path: Path) -> None:
    engine = make()
    with pytest.raises(FileError, match=r"cannot open .*none: No such file") as caught:
        engine.open(tmp_path / "none")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(FileError, match=r"cannot create .*f with 5 bytes: No such file"):
        engine.create(tmp_path / "none" / "f", 5)
    (tmp_path / "f").write_bytes(bytes(10))
    with pytest.raises(FileError, match="EBADF"):
        engine.open(tmp_path / "f").write(torch.zeros(1))
    with pytest.raises(FileError, match=r"with \d+ bytes: .*E(NOSPC|FBIG)") as caught:
        engine.create(tmp_path / "huge", 1 << 60)
    assert not (tmp_path / "huge").exists()
    assert caught.value.wanted == 1 << 60


def test_the_status_says_once_which_files_are_buffered(make: Make, tmp_path: Path) -> None:
    engine = make()
    status = engine.status()
    assert status.engine in ("io_uring", "threads") and status.reason
    assert (status.queue_depth, status.block_size, status.threads) == (4, 8192, 3)
    assert status.buffered == ()
    for _ in range(2):  # procfs has no O_DIRECT
        with engine.open("/proc/self/cmdline") as file:
            assert not file.direct
            start = torch.zeros(3, dtype=torch.uint8)
            file.read(start)
            assert bytes(start.tolist()) == Path("/proc/self/cmdline").read_bytes()[:3]
    lines = engine.status().buffered
    assert len(lines) == 1 and lines[0].startswith("/proc/self: the ")


def test_sync(make: Make, tmp_path: Path) -> None:
    with make().create(tmp_path / "f", 10) as file:
        file.write(random_bytes(10))
        file.sync()


def test_what_does_not_do_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    engine = make()
    file = engine.create(tmp_path / "f", 100)
    with pytest.raises(ValueError, match=r"File\.write: buffer of shape \(5, 2\).*not contiguous"):
        file.write(torch.zeros(2, 5).t())
    with pytest.raises(TypeError, match=r"File\.read: buffer is torch.strided on meta"):
        file.read(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="offset is -1 bytes"):
        file.read(torch.zeros(3), -1)
    with pytest.raises(ValueError, match="num_bytes is -1"):
        engine.create(tmp_path / "g", -1)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.write(torch.zeros(3))
    other = engine.create(tmp_path / "f", 100)
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="FileEngine: it is closed"):
        other.read(torch.zeros(3))
    with pytest.raises(ValueError, match="FileEngine: it is closed"):
        engine.open(tmp_path / "f")


def test_closing_raises_what_nobody_waited_for(make: Make) -> None:
    engine = make()
    engine.open("/dev/full", writable=True).submit_write(torch.zeros(3))
    with pytest.raises(FileError, match="ENOSPC"):
        engine.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"engine": "aio"}, "engine is 'aio'; there are auto, io_uring, threads"),
        ({"block_size": 5000}, "block_size is 5000 bytes; wanted a multiple of 4096"),
        ({"block_size": 0}, "block_size is 0"),
        ({"queue_depth": 0}, "queue_depth is 0; wanted 1 to 4096"),
        ({"threads": 5000}, "threads is 5000"),
    ],
)
def test_settings_that_make_no_sense(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FileEngine(**arguments)  # type: ignore[arg-type]


def test_io_uring_by_name_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroexp.ops.native import select

    monkeypatch.setattr(backend, "native", lambda: select("reference"))
    with pytest.raises(ZeroexpError, match=r"io_uring cannot be had here: .*use engine=auto"):
        FileEngine("io_uring")
    with FileEngine() as engine:
        assert engine.status().engine == "threads"


def test_an_error_survives_pickling() -> None:
    error = FileError(errno.ENOSPC, "write failed", "/f", offset=1, wanted=2, done=3, free=4)
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, str(again), again.filename) == (errno.ENOSPC, "write failed", "/f")
    assert (again.offset, again.wanted, again.done, again.free) == (1, 2, 3, 4)


def in_a_process(code: str, cwd: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result.stdout


ENGINES = [("threads", "reference"), ("threads", ""), ("auto", "")]


@pytest.mark.parametrize(("engine", "isa"), ENGINES)
def test_a_size_limit_is_an_error_and_kills_nobody(tmp_path: Path, engine: str, isa: str) -> None:
    code = f"""
import resource, torch
from zeroexp.errors import FileError
from zeroexp.tiers import FileEngine
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
with FileEngine("{engine}") as engine:
    try:
        engine.create("large", 6 << 20)
    except FileError as error:
        print("create", error.errno, error.wanted)
    file = engine.create("grows", 0)
    try:
        file.write(torch.zeros(6 << 20, dtype=torch.uint8))
    except FileError as error:
        print("write", error.errno, error.wanted, error.offset >= 3 << 20, error.done <= 4 << 20)
        print(error)
    data = torch.arange(1 << 20, dtype=torch.int32)
    file.write(data)
    back = torch.zeros_like(data)
    file.read(back)
    print(back.equal(data))
"""
    lines = in_a_process(code, tmp_path, {"ZEROEXP_ISA": isa}).splitlines()
    assert lines[0] == f"create {errno.EFBIG} {6 << 20}"
    assert lines[1] == f"write {errno.EFBIG} {6 << 20} True True"
    assert "grows" in lines[2] and "bytes are free" in lines[2] and "ulimit -f" in lines[2]
    assert lines[3] == "True", "what fits goes both ways bitwise"
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(("engine", "isa"), ENGINES)
def test_a_process_may_end_with_requests_open(tmp_path: Path, engine: str, isa: str) -> None:
    code = f"""
import torch
from zeroexp.tiers import FileEngine
for i in range(5):
    engine = FileEngine("{engine}")
    engine.create("f", 8 << 20).submit_write(torch.zeros(8 << 20, dtype=torch.uint8))
    engine = engine if i else None
print("end")
"""
    assert in_a_process(code, tmp_path, {"ZEROEXP_ISA": isa}) == "end\n"


@pytest.mark.parametrize(("engine", "isa"), ENGINES)
def test_a_fork_refuses_and_ends(tmp_path: Path, engine: str, isa: str) -> None:
    code = f"""
import os, torch
from zeroexp.tiers import FileEngine
engine = FileEngine("{engine}")
file = engine.create("f", 100)
if os.fork() == 0:
    try:
        file.write(torch.zeros(3))
    except ValueError as error:
        print(error, flush=True)
    engine.close()
    del engine, file
    raise SystemExit(0)
print(os.wait()[1])
file.write(torch.zeros(3))
"""
    lines = in_a_process(code, tmp_path, {"ZEROEXP_ISA": isa}).splitlines()
    assert lines[0].startswith("FileEngine: it was made before this process was forked")
    assert lines[1] == "0"
