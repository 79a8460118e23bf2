from __future__ import annotations

import gc

import pytest
import torch

from zeroexp import ops

MIB = 1 << 20


def resident_mib() -> float:
    """Resident memory of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / MIB


def test_release_gives_the_pages_back_and_keeps_the_address(isa: str) -> None:
    before = resident_mib()
    memory = ops.HostRange(64 * MIB)
    t = memory.tensor(torch.float32)
    view = t[1000:2000].view(10, 100)
    address = t.data_ptr()
    assert resident_mib() < before + 8, "a fresh range takes no memory"
    t.fill_(1)
    assert resident_mib() > before + 60
    memory.release()
    assert resident_mib() < before + 8
    assert t.data_ptr() == address
    assert view.eq(0).all(), "released pages read as zeros"
    t.fill_(2)
    assert view.eq(2).all(), "the same addresses are filled again"
    memory.close()


def test_a_tensor_outlives_close_without_harm(isa: str) -> None:
    memory = ops.HostRange(4 * MIB)
    t = memory.tensor(torch.int32)
    t.fill_(3)
    memory.close()
    memory.close()
    del memory
    gc.collect()
    assert t.eq(0).all()
    t.fill_(4)
    assert t.eq(4).all()


def test_memory_goes_with_the_last_tensor(isa: str) -> None:
    before = resident_mib()
    t = ops.host_zeros(16 * MIB, torch.float32)
    assert t.shape == (16 * MIB,) and t.abs_().amax() == 0
    part = t.fill_(1)[5:10]
    del t
    gc.collect()
    assert resident_mib() > before + 60
    assert part.eq(1).all()
    del part
    gc.collect()
    assert resident_mib() < before + 8


def test_two_ranges_never_share_memory(isa: str) -> None:
    one, two = ops.host_zeros(3 * MIB, torch.uint8), ops.host_zeros(3 * MIB, torch.uint8)
    one.fill_(1)
    two.fill_(2)
    assert one.eq(1).all() and two.eq(2).all()


def test_large_compiled_ranges_start_at_a_huge_page(isa: str) -> None:
    if isa == "reference":
        pytest.skip("Python's mmap has no alignment")
    memory = ops.HostRange(5 * MIB)
    t = memory.tensor(torch.uint8)
    assert t.data_ptr() % (2 * MIB) == 0
    assert memory.resident_bytes == 0
    t.fill_(1)
    assert memory.resident_bytes == 5 * MIB
    memory.release()
    assert memory.resident_bytes == 0


@pytest.mark.parametrize(("size", "other"), [(5, 5), (5, 3), (3, 5), (5, 1), (1, 1)])
def test_pages_move_between_ranges(isa: str, size: int, other: int) -> None:
    source, target = ops.HostRange(size * MIB), ops.HostRange(other * MIB)
    left, taken = source.tensor(torch.uint8), target.tensor(torch.uint8)
    address = taken.data_ptr()
    left.fill_(1)
    target.take_pages(source)
    assert left.eq(0).all(), "the range left behind reads as zeros"
    taken.fill_(2)
    left.fill_(3)
    assert taken.data_ptr() == address and taken.eq(2).all() and left.eq(3).all()
    target.release()
    source.take_pages(source)
    assert left.eq(3).all(), "taking its own pages changes nothing"
    source.release()
    if isa != "reference" and size == other and size > 2:
        left.fill_(1)
        target.take_pages(source)
        assert target.resident_bytes == size * MIB, "they came along"
        assert taken.eq(1).all()


def test_views_by_count_and_offset(isa: str) -> None:
    memory = ops.HostRange(100)
    memory.tensor(torch.uint8)[40:44] = torch.tensor([0, 0, 128, 63], dtype=torch.uint8)
    assert memory.tensor(torch.float32, count=1, offset=40).item() == 1.0
    assert memory.tensor(torch.float64).numel() == 12
    assert memory.tensor(torch.float32, count=0).numel() == 0
    assert ops.HostRange(0).tensor(torch.float32).numel() == 0


@pytest.mark.parametrize(("count", "offset"), [(26, 0), (25, 4), (None, 2), (-1, 0), (1, -4)])
def test_what_does_not_fit_is_refused(isa: str, count: int | None, offset: int) -> None:
    with pytest.raises(ValueError, match="does not fit in 100 bytes"):
        ops.HostRange(100).tensor(torch.float32, count, offset)


def test_a_closed_range_and_a_negative_size_are_refused(isa: str) -> None:
    memory = ops.HostRange(100)
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.tensor(torch.uint8)
    with pytest.raises(ValueError, match="num_bytes is -1"):
        ops.HostRange(-1)
