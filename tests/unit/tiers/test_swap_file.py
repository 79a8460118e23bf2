"""Swap files over every engine; what is on the disk is looked at with open()."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.tiers.conftest import Make
from tests.unit.tiers.test_file import ENGINES, in_a_process, random_bytes
from zeroexp.errors import FileError, SwapError
from zeroexp.tiers import FileEngine, Pending, Ring, SwapFile, Traffic, file
from zeroexp.tiers.python_pool import FileOutcome, PythonPool

Swap = Callable[..., SwapFile]


class Whenever(PythonPool):
    """Transfers in any order, each as late as it may be: at a moment drawn by chance, or when it is
    waited for. A buffer that changes meanwhile, or a read that does not wait for its write, shows.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("test", block_size=8192, threads=1)
        self.draw = random.Random(seed)
        self.stopped = False
        self.to_do: dict[int, tuple[int, bool, int, int, int]] = {}
        self.done: dict[int, FileOutcome] = {}

    def submit(self, *, file: int, write: bool, address: int, num_bytes: int, offset: int) -> int:
        ticket = next(self._numbers)
        self.to_do[ticket] = (file, write, address, num_bytes, offset)
        return ticket

    def over(self, ticket: int) -> bool:
        if self.to_do and not self.stopped and self.draw.random() < 0.3:
            self._do(self.draw.choice(list(self.to_do)))
        return ticket in self.done

    def wait(self, ticket: int) -> FileOutcome:
        if ticket in self.to_do:
            self._do(ticket)
        return self.done.pop(ticket)

    def _do(self, ticket: int) -> None:
        number, write, address, num_bytes, offset = self.to_do.pop(ticket)
        inner = super().submit(
            file=number, write=write, address=address, num_bytes=num_bytes, offset=offset
        )
        self.done[ticket] = super().wait(inner)


@pytest.fixture
def whenever(monkeypatch: pytest.MonkeyPatch) -> Whenever:
    backend = Whenever(seed=3)
    monkeypatch.setattr(file, "make_backend", lambda *_: backend)
    return backend


def swap_in(engine: FileEngine, folder: Path, num_slots: int = 3) -> Swap:
    ring, traffic = Ring(num_slots, 40_000), Traffic()

    def make(record_bytes: list[int], name: str = "swap", checksum: bool = True) -> SwapFile:
        path = folder / name
        return SwapFile(engine, path, record_bytes, ring, traffic, checksum=checksum)

    return make


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def put(swap: SwapFile, record: int, data: Tensor) -> None:
    swap.open(record).copy_(data)
    swap.keep(record)


SHAPES = [(n, torch.float32) for n in (1, 127, 128, 129, 262145)] + [
    (n, torch.float16) for n in (1, 127, 129, 4097)
]


def test_odd_sizes_round_trip_bitwise(make: Make, tmp_path: Path) -> None:
    """Case NV-07: through slots, and to and from the caller's memory."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(n, generator=generator).to(dtype) for n, dtype in SHAPES]
    data[0].fill_(float("nan"))
    sizes = [t.numel() * t.element_size() for t in data]
    ring, traffic = Ring(3, max(sizes)), Traffic()
    swap = SwapFile(make(65536), tmp_path / "f", sizes, ring, traffic)
    for record, t in enumerate(data):
        if record % 2:
            put(swap, record, bytes_of(t))
        else:
            swap.store(record, t).wait()
    swap.flush()
    content = (tmp_path / "f").read_bytes()
    start = 0
    for t, size in zip(data, sizes, strict=True):
        assert content[start : start + size] == bytes(bytes_of(t).tolist())
        start += -(-size // 4096) * 4096
    assert len(content) == swap.num_bytes == start
    for record, t in enumerate(data):
        assert swap.open(record).equal(bytes_of(t))
        swap.drop(record)
        out = torch.empty_like(t)
        swap.load(record, out).wait()
        assert bytes_of(out).equal(bytes_of(t))


SIZES = [1, 127, 4096, 5000, 12_288, 40_000, 129, 8191]


def many_calls(swaps: list[SwapFile], num_slots: int, seed: int) -> None:
    """Calls in random order, against plain dicts."""
    draw = random.Random(seed)
    models = [dict.fromkeys(range(len(SIZES)), torch.empty(0)) for _ in swaps]
    for model in models:
        for record, size in enumerate(SIZES):
            model[record] = torch.zeros(size, dtype=torch.uint8)
    taken: dict[tuple[int, int], Tensor] = {}
    loads: list[tuple[Pending, Tensor, Tensor]] = []
    stores: list[Pending] = []
    for count in range(400):
        which, record = draw.randrange(len(swaps)), draw.randrange(len(SIZES))
        swap, model = swaps[which], models[which]
        call = draw.choice(["prefetch", "open", "open", "keep", "keep", "drop", "load", "store"])
        if taken and (call in ("keep", "drop") or len(taken) == num_slots):
            (which, record), data = taken.popitem()
            if call == "drop":
                data.fill_(99)
                swaps[which].drop(record)
            else:
                models[which][record] = random_bytes(SIZES[record], count)
                data.copy_(models[which][record])
                swaps[which].keep(record)
        elif call == "prefetch":
            swap.prefetch(record)
        elif (which, record) in taken:
            continue
        elif call == "open":
            taken[which, record] = swap.open(record)
            assert taken[which, record].equal(model[record]), (count, record)
        elif call == "load":
            out = torch.full((SIZES[record],), 7, dtype=torch.uint8)
            loads.append((swap.load(record, out), out, model[record]))
        elif call == "store":
            model[record] = random_bytes(SIZES[record], count)
            stores.append(swap.store(record, model[record].clone()))
        if draw.random() < 0.1:
            for pending, out, expected in loads:
                pending.wait()
                assert out.equal(expected), count
            loads.clear()
        if draw.random() < 0.05:
            swap.flush()
    for pending in stores:
        pending.wait()
    for which, record in list(taken):
        swaps[which].drop(record)
    for swap, model in zip(swaps, models, strict=True):
        for record, expected in model.items():
            assert swap.open(record).equal(expected)
            swap.drop(record)
        swap.close()
        for record, (start, size) in enumerate(zip(swap._offsets, SIZES, strict=False)):
            with open(swap.path, "rb") as raw:
                raw.seek(start)
                assert raw.read(size) == bytes(model[record].tolist())


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_any_order_of_calls_is_a_dict(make: Make, tmp_path: Path, num_slots: int) -> None:
    swap = swap_in(make(), tmp_path, num_slots)
    many_calls([swap(SIZES, "a"), swap(SIZES, "b")], num_slots, seed=num_slots)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_any_order_of_transfers_is_a_dict(
    whenever: Whenever, tmp_path: Path, num_slots: int
) -> None:
    with FileEngine() as engine:
        for seed in range(5):
            swap = swap_in(engine, tmp_path, num_slots)
            many_calls([swap(SIZES, "a"), swap(SIZES, "b", False)], num_slots, seed)


def test_a_streaming_step_overlaps(whenever: Whenever, tmp_path: Path) -> None:
    """Nothing but the record at hand is waited for: i+1 is read and i-1 written meanwhile."""
    whenever.stopped = True
    with FileEngine() as engine:
        ring, traffic = Ring(3, 8192), Traffic()
        swap = SwapFile(engine, tmp_path / "f", [8192] * 6, ring, traffic)
        for record in range(6):
            put(swap, record, random_bytes(8192, record))
        swap.flush()
        traffic.mark_step()
        assert traffic.last_step.read == 0 and traffic.last_step.written == 6 * 8192
        assert swap.prefetch(0) and swap.prefetch(1)
        for record in range(6):
            data = swap.open(record)
            kinds = [write for _, write, *_ in whenever.to_do.values()]
            assert kinds.count(False) == (record < 5), "the next one is on its way"
            assert data.equal(random_bytes(8192, record))
            data.add_(1)
            swap.keep(record)
            assert whenever.to_do, "nobody waited for the write"
            if record < 4 and not swap.prefetch(record + 2):
                # All slots are busy while the disk is as slow as can be; the oldest write ends now.
                assert record > 0
                writes = [ticket for ticket, (_, write, *_) in whenever.to_do.items() if write]
                assert len(writes) == 2
                whenever._do(min(writes))
                assert swap.prefetch(record + 2)
        swap.flush()
        traffic.mark_step()
        assert (traffic.last_step.read, traffic.last_step.written) == (6 * 8192, 6 * 8192)
        swap.close()


def test_slots_are_the_rings_and_no_others(make: Make, tmp_path: Path) -> None:
    ring, traffic = Ring(2, 5000), Traffic()
    assert (ring.slot_bytes, ring.num_bytes) == (8192, 16_384)
    swap = SwapFile(make(), tmp_path / "f", [5000] * 9, ring, traffic)
    addresses = set()
    for _ in range(3):
        for record in range(9):
            swap.prefetch(record)
            addresses.add(swap.open(record).data_ptr())
            swap.keep(record)
    assert len(addresses) == 2 and all(address % 4096 == 0 for address in addresses)


def test_a_record_never_written_is_zeros_without_a_transfer(make: Make, tmp_path: Path) -> None:
    ring, traffic = Ring(2, 5000), Traffic()
    swap = SwapFile(make(), tmp_path / "f", [5000, 5000], ring, traffic)
    assert swap.prefetch(0)
    data = swap.open(0)
    assert not data.any()
    data.fill_(1)
    swap.drop(0)
    assert not swap.open(0).any()
    swap.drop(0)
    into = torch.ones(1250)
    swap.load(1, into).wait()
    assert not into.any()
    assert traffic.total.read == traffic.total.written == 0


def test_prefetched_records_give_way(make: Make, tmp_path: Path) -> None:
    """What was read ahead and not opened never keeps a slot from a record that is needed now."""
    swap = swap_in(make(), tmp_path, 2)([100] * 4)
    for record in range(4):
        put(swap, record, torch.full((100,), record, dtype=torch.uint8))
    swap.flush()
    assert swap.prefetch(0) and swap.prefetch(1) and not swap.prefetch(2)
    assert swap.open(2)[0] == 2 and swap.open(3)[0] == 3
    swap.drop(2)
    assert swap.open(1)[0] == 1


def test_a_slot_whose_write_is_over_is_free_for_every_file(
    whenever: Whenever, tmp_path: Path
) -> None:
    whenever.stopped = True
    with FileEngine() as engine:
        make = swap_in(engine, tmp_path, 2)
        first, second = make([100, 100], "a"), make([100], "b")
        second.store(0, random_bytes(100)).wait()
        for record in (0, 1):
            put(first, record, random_bytes(100, record))
        assert not second.prefetch(0)
        whenever._do(max(whenever.to_do))
        assert second.prefetch(0) and len(whenever.to_do) == 2
        assert second.open(0).equal(random_bytes(100))
        assert first.open(1).equal(random_bytes(100, 1)), "waits for the slot of the first write"


def test_a_store_outdates_what_was_prefetched(make: Make, tmp_path: Path) -> None:
    swap = swap_in(make(), tmp_path)([100])
    put(swap, 0, random_bytes(100))
    swap.flush()
    assert swap.prefetch(0)
    swap.store(0, random_bytes(100, 1))
    assert swap.open(0).equal(random_bytes(100, 1))


def change(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as raw:
        raw.seek(offset)
        raw.write(data)


def reads(swap: SwapFile, record: int) -> list[Callable[[], object]]:
    """The ways to the bytes of a record."""
    into = torch.zeros(swap.record_bytes[record], dtype=torch.uint8)
    return [
        lambda: swap.open(record),
        lambda: (swap.prefetch(record), swap.open(record)),
        lambda: swap.load(record, into).wait(),
    ]


def test_a_flipped_bit_is_found(make: Make, tmp_path: Path) -> None:
    swap = swap_in(make(), tmp_path)([5000, 5000, 100])
    for record, size in enumerate(swap.record_bytes):
        put(swap, record, random_bytes(size, record))
    swap.flush()
    for byte, bit in ((0, 0), (2500, 7), (4999, 3)):
        good = int(random_bytes(5000, 1)[byte])
        change(swap.path, 8192 + byte, bytes([good ^ (1 << bit)]))
        for read in reads(swap, 1):
            with pytest.raises(SwapError) as caught:
                read()
            error = caught.value
            assert (error.path, error.record) == (str(swap.path), 1)
            assert (error.offset, error.num_bytes) == (8192, 5000)
            assert error.expected != error.found
            text = f"record 1 of {swap.path} (bytes 8192 to 13192) is not what was written there"
            assert text in str(error)
            assert f"{error.found:016x}" in str(error) and f"{error.expected:016x}" in str(error)
        change(swap.path, 8192 + byte, bytes([good]))
        for read in reads(swap, 1):
            read()
            if swap._slots:
                swap.drop(1)
    for record in (0, 2):
        assert swap.open(record).equal(random_bytes(swap.record_bytes[record], record))


def test_swapped_records_are_found(make: Make, tmp_path: Path) -> None:
    swap = swap_in(make(), tmp_path)([4096, 4096])
    same = random_bytes(4096)
    put(swap, 0, same)
    put(swap, 1, same + 1)
    swap.flush()
    change(swap.path, 0, bytes([*(same + 1).tolist(), *same.tolist()]))
    for record in (0, 1):
        for read in reads(swap, record):
            with pytest.raises(SwapError, match=f"record {record} of "):
                read()


def test_a_truncated_file_is_found(make: Make, tmp_path: Path) -> None:
    swap = swap_in(make(), tmp_path)([5000, 5000])
    for record in (0, 1):
        put(swap, record, random_bytes(5000, record) | 1)
    swap.flush()
    os.truncate(swap.path, 9000)
    for read in reads(swap, 1):
        with pytest.raises(FileError, match="the file was cut") as caught:
            read()
        assert caught.value.errno == errno.ENODATA and caught.value.filename == str(swap.path)
    os.truncate(swap.path, 16_384)  # the size is right again, the bytes are gone
    for read in reads(swap, 1):
        with pytest.raises(SwapError, match="record 1"):
            read()
    assert swap.open(0).equal(random_bytes(5000) | 1)


def test_checks_can_be_left_out(make: Make, tmp_path: Path) -> None:
    swap = swap_in(make(), tmp_path)([10], checksum=False)
    put(swap, 0, torch.ones(10, dtype=torch.uint8))
    swap.flush()
    change(swap.path, 3, b"\x07")
    assert swap.open(0).tolist() == [1, 1, 1, 7, 1, 1, 1, 1, 1, 1]


class Failing:
    """A backend whose writes go to a full disk while ``on``."""

    def __init__(self, backend: file.Backend, number: int) -> None:
        self.__dict__["_inner"] = (backend, number)
        self.on = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner[0], name)

    def submit(self, **arguments: object) -> int:
        backend, number = self._inner
        if arguments["write"] and self.on:
            arguments["file"] = number
        return int(backend.submit(**arguments))


@pytest.mark.parametrize("how", ["call", "flush", "close", "wait"])
def test_an_error_of_a_write_is_not_lost(make: Make, tmp_path: Path, how: str) -> None:
    engine = make()
    swap = swap_in(engine, tmp_path)([5000, 5000])
    put(swap, 0, random_bytes(5000))
    swap.flush()
    full = engine.open("/dev/full", writable=True)
    failing = Failing(engine._backend, full._number)
    engine._backend = failing  # type: ignore[assignment]
    if how == "wait":
        pending = swap.store(1, random_bytes(5000))
        for _ in range(2):
            with pytest.raises(FileError, match="5000 bytes"):
                pending.wait()
        swap.flush()  # it was raised, once is enough
    else:
        put(swap, 1, random_bytes(5000))
        if how == "call":  # the write ends some time; the call after that says so
            with pytest.raises(FileError) as caught:
                for _ in range(10_000):
                    swap.prefetch(0)
                    time.sleep(0.001)
        else:
            with pytest.raises(FileError) as caught:
                swap.flush() if how == "flush" else swap.close()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.wanted == 8192 and "bytes are free" in str(caught.value)
        assert f"of {swap.path} failed" in str(caught.value)
    failing.on = False
    if how != "close":
        for read in reads(swap, 1):
            with pytest.raises(FileError, match="ENOSPC"):
                read()
        assert swap.open(0).equal(random_bytes(5000))
        swap.store(1, random_bytes(5000, 1))
        assert swap.open(1).equal(random_bytes(5000, 1))
    swap.close()
    engine._backend = failing._inner[0]


@pytest.mark.parametrize(("engine", "isa"), ENGINES)
def test_a_full_disk_at_every_write(tmp_path: Path, engine: str, isa: str) -> None:
    """Case NV-01: the size limit meets each write of a loop in turn, the others are as they were.

    Records lie at 0, 8192, ...: a limit at one of these offsets refuses the write there.
    """
    code = f"""
import errno, resource, signal, torch
from zeroexp.errors import FileError
from zeroexp.tiers import FileEngine, Ring, SwapFile, Traffic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
SIZES = [5000, 8192, 5001, 8191]
met = 0
with FileEngine("{engine}", block_size=4096) as engine:
    for position in range(3 * len(SIZES)):
        for how in ("keep", "store"):
            ring, traffic = Ring(2, 8192), Traffic()
            swap = SwapFile(engine, "swap", SIZES, ring, traffic)
            model, count = {{}}, -1
            for step in range(3):
                for record, size in enumerate(SIZES):
                    count += 1
                    data = torch.full((size,), 1 + count, dtype=torch.uint8)
                    failing = count == position
                    if failing:
                        swap.flush()
                        resource.setrlimit(resource.RLIMIT_FSIZE, (8192 * record, hard))
                    try:
                        if how == "keep":
                            swap.open(record).copy_(data)
                            swap.keep(record)
                        else:
                            swap.store(record, data)
                        if failing:
                            swap.flush()
                        model[record] = data
                    except FileError as error:
                        assert failing and error.errno == errno.EFBIG, error
                        assert error.filename == "swap" and error.offset // 8192 == record
                        assert "bytes are free" in str(error) and "ulimit -f" in str(error)
                        assert error.wanted == (size if how == "store" else -(-size // 4096) * 4096)
                        met += 1
                        break
                    finally:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                else:
                    continue
                break
            for other, expected in model.items():
                out = torch.empty_like(expected)
                if other == record:
                    try:
                        swap.open(other)
                        raise SystemExit("a record that was not written could be read")
                    except FileError:
                        continue
                assert swap.open(other).equal(expected)
                swap.drop(other)
                swap.load(other, out).wait()
                assert out.equal(expected)
            swap.close()
print(met)
"""
    assert in_a_process(code, tmp_path, {"ZEROEXP_ISA": isa}) == "24\n"


def test_calls_out_of_order_are_refused(make: Make, tmp_path: Path) -> None:
    ring, traffic = Ring(2, 4096), Traffic()
    engine = make()
    swap = SwapFile(engine, tmp_path / "f", [10, 10, 10, 5000], ring, traffic)
    for record in (-1, 4):
        with pytest.raises(ValueError, match=f"record is {record}; there are 4"):
            swap.open(record)
    for call in (swap.keep, swap.drop):
        with pytest.raises(ValueError, match="record 0 is not open"):
            call(0)
    swap.open(0)
    with pytest.raises(ValueError, match="record 0 is open already"):
        swap.open(0)
    with pytest.raises(ValueError, match="load of record 0, which is open"):
        swap.load(0, torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(ValueError, match="store of record 0, which is open"):
        swap.store(0, torch.zeros(10, dtype=torch.uint8))
    swap.open(1)
    with pytest.raises(ValueError, match=r"Ring: all 2 slots of 4096 bytes \(8192 bytes together"):
        swap.open(2)
    with pytest.raises(ValueError, match="record 3 has 5000 bytes, a slot of the ring 4096"):
        swap.open(3)
    with pytest.raises(ValueError, match=r"with memory of 12 bytes .*wanted 10 contiguous"):
        swap.load(2, torch.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        swap.store(2, torch.zeros(20, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match="a record of -1 bytes"):
        SwapFile(engine, tmp_path / "g", [5, -1], ring, traffic)
    for sizes in ((0, 4096), (2, 0)):
        with pytest.raises(ValueError, match="wanted at least 1"):
            Ring(*sizes)
    swap.close()
    swap.close()
    with pytest.raises(ValueError, match="it is closed"):
        swap.open(0)
    other = SwapFile(engine, tmp_path / "g", [10, 10], ring, traffic)
    other.open(0)
    other.open(1)  # closing gave both slots back


def test_a_disk_too_small_is_an_error_before_anything_is_written(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=r"cannot create .*E(FBIG|NOSPC)"):
        SwapFile(make(), tmp_path / "f", [1 << 60], Ring(1, 4096), Traffic())
    assert not (tmp_path / "f").exists()
