from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zeroexp import ops

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [*range(0, 67), 127, 128, 129, 191, 1000]
WORDS = {2: torch.int16, 4: torch.int32}
ODD = [0.0, -0.0, 1e-45, -1e-40, 6e-8, math.inf, -math.inf, math.nan, 3.4e38, 65519.0, 65520.0]


def bits(t: Tensor) -> Tensor:
    return t.view(WORDS[t.element_size()])


def masters(size: int) -> Tensor:
    random = torch.Generator().manual_seed(size)
    t = torch.randn(size, generator=random)
    t[::3] = torch.tensor(ODD).repeat(-(-size // 33))[: len(t[::3])]
    return t


def narrowed(master: Tensor, dtype: torch.dtype) -> Tensor:
    """As a step's kernels leave it: every NaN is the quiet one."""
    low = master.to(dtype)
    return torch.where(low.isnan(), torch.tensor(math.nan, dtype=dtype), low)


@pytest.mark.parametrize("dtype", TYPES)
def test_without_edits_the_master_keeps_its_width(isa: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        master = masters(size)
        low = narrowed(master, dtype)
        if isa == "reference":  # torch's own conversion of a NaN depends on its place in a vector
            master = master.where(~master.isnan(), 1.0)
            low = master.to(dtype, copy=True)
        before = master.clone()
        assert ops.adopt_edits(master, low) is False
        assert torch.equal(bits(master), bits(before))


@pytest.mark.parametrize("dtype", TYPES)
def test_one_edit_at_every_place(isa: str, dtype: torch.dtype) -> None:
    """The element takes the edit, all others (also around unaligned slices) keep their bits."""
    edits = torch.tensor([5.0, -0.0, math.inf, math.nan, 2.0**-24]).to(dtype)
    for size in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129):
        around = torch.randn(size + 8)
        low_around = torch.full((size + 8,), 7.0, dtype=dtype)
        master, low = around[3 : 3 + size], low_around[1 : 1 + size]
        low.copy_(master)
        for place in range(size):
            edit = edits[place % len(edits)]
            low[place] = edit
            want = around.clone()
            want[3 + place] = edit.float()
            assert ops.adopt_edits(master, low) is True
            assert torch.equal(around.nan_to_num(9.0), want.nan_to_num(9.0))
            assert torch.equal(around.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
            low[place], around[3 + place] = 1.0, 1.0
        assert ops.adopt_edits(master, low) is False


@pytest.mark.parametrize("dtype", TYPES)
def test_all_edited(isa: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        master = masters(size)
        low = torch.full((size,), 768.0, dtype=dtype)
        assert ops.adopt_edits(master, low) is (size > 0)
        assert master.eq(768).all()
        assert ops.adopt_edits(master, low) is False


def test_zero_and_minus_zero_differ(isa: str) -> None:
    for dtype in TYPES:
        master, low = torch.zeros(20), torch.zeros(20, dtype=dtype)
        low[18] = -0.0
        assert ops.adopt_edits(master, low) is True
        assert master.signbit().nonzero().flatten().tolist() == [18]


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_every_narrow_number_is_widened(isa: str, dtype: torch.dtype) -> None:
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    master = torch.full((len(low),), 0.1)  # no number of 16 bits
    assert ops.adopt_edits(master, low) is True
    same = low == torch.tensor(0.1).to(dtype)
    want = low.float()
    want[same] = 0.1
    numbers = ~want.isnan()
    assert int(same.sum()) == 1
    assert torch.equal(bits(master[numbers]), bits(want[numbers]))
    assert bool(master[~numbers].isnan().all())


@pytest.mark.parametrize("dtype", TYPES)
def test_not_a_number(isa: str, dtype: torch.dtype) -> None:
    """A NaN stays one, a number that follows it is taken over, and the other way round."""
    master, low = torch.ones(67), torch.ones(67, dtype=dtype)
    master[[3, 40, 66]] = math.nan
    low[[3, 5, 65, 66]] = math.nan
    assert ops.adopt_edits(master, low) is True
    assert master.isnan().nonzero().flatten().tolist() == [3, 5, 65, 66]
    assert master[40] == 1


def test_fp32_is_compared_and_taken_over_by_its_bits(isa: str) -> None:
    """Also where a comparison of numbers sees nothing: another payload of a NaN."""
    low = torch.ones(70)
    bits(low)[[2, 68]] = 0x7FC00001
    master = torch.ones(70)
    bits(master)[[2, 68]] = 0x7FC00002
    assert ops.adopt_edits(master, low) is True
    assert torch.equal(bits(master), bits(low))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("dtype", TYPES)
def test_threads(isa: str, dtype: torch.dtype, threads: int) -> None:
    start = torch.randn(300_007)
    low = start.to(dtype, copy=True)
    want = start.clone()
    for place in (0, 150_000, 300_006):
        low[place] = 3.0
        want[place] = 3.0
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert ops.adopt_edits(start, low) is True
        assert ops.adopt_edits(start, low) is False
    finally:
        torch.set_num_threads(before)
    assert torch.equal(start, want)


def test_wrong_arguments_are_named(isa: str) -> None:
    master = torch.zeros(4)
    with pytest.raises(TypeError, match="adopt_edits: master is bfloat16, expected float32"):
        ops.adopt_edits(master.bfloat16(), torch.zeros(4))
    with pytest.raises(TypeError, match="adopt_edits: low is float64, expected float32 or bf"):
        ops.adopt_edits(master, torch.zeros(4).double())
    with pytest.raises(ValueError, match="low has 3 elements, expected 4"):
        ops.adopt_edits(master, torch.zeros(3))
    with pytest.raises(ValueError, match="share memory"):
        ops.adopt_edits(master, master)
