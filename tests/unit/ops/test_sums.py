from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from zeroexp import ops

SIZES = [*range(0, 67), 1000, 65_535, 65_537, 200_003]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def values(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=random, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sum_squares_is_accurate_to_fp64(isa: str, dtype: torch.dtype, size: int) -> None:
    t = values(size, dtype)
    want = math.fsum(x * x for x in t.double().tolist())
    assert ops.sum_squares(t) == pytest.approx(want, rel=1e-13, abs=0)


def test_sum_squares_does_not_round_to_fp32(isa: str) -> None:
    """2^24 + 1 has no fp32 representation; 1 + 1e-7 squared has 47 significant bits."""
    t = torch.tensor([4096.0, 1.0, 1 + 2.0**-23])
    want = Fraction(4096) ** 2 + 1 + (1 + Fraction(1, 2**23)) ** 2
    assert ops.sum_squares(t) == float(want)


@pytest.mark.parametrize("dtype", TYPES)
def test_sum_squares_lets_bad_values_through(isa: str, dtype: torch.dtype) -> None:
    for position in (0, 16, 36):
        t = torch.ones(37, dtype=dtype)
        t[position] = math.inf
        assert ops.sum_squares(t) == math.inf
        t[position] = math.nan
        assert math.isnan(ops.sum_squares(t))


def test_sum_squares_reaches_beyond_fp32(isa: str) -> None:
    t = torch.full((4,), 3e38)
    want = 4 * float(t[0]) ** 2
    assert ops.sum_squares(t) == pytest.approx(want, rel=1e-15)
    small = torch.full((4,), 1e-30)
    assert ops.sum_squares(small) == pytest.approx(4 * float(small[0]) ** 2, rel=1e-15, abs=0)


def test_sum_squares_bits_are_the_same_for_every_thread_count(isa: str) -> None:
    t = values(500_009, torch.float32)
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.add(ops.sum_squares(t))
    finally:
        torch.set_num_threads(before)
    if isa != "reference":  # torch's own sum may differ in the last bits of fp64
        assert len(results) == 1
    assert max(results) == pytest.approx(min(results), rel=1e-14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_sum_into_adds_in_order(isa: str, size: int, num_parts: int) -> None:
    parts = [values(size, torch.float32, seed) for seed in range(num_parts)]
    out = torch.full((size,), math.nan)
    ops.sum_into(out, parts)
    want = parts[0].clone()
    for part in parts[1:]:
        want = want + part
    assert torch.equal(out, want)


def test_sum_into_order_matters_and_is_the_given_one(isa: str) -> None:
    """(1 + 2^-24) + 2^-24 is 1, since each half unit is rounded away; the other order keeps it."""
    one, half = torch.ones(20), torch.full((20,), 2.0**-24)
    out = torch.empty(20)
    ops.sum_into(out, [one, half, half])
    assert out.eq(1).all()
    ops.sum_into(out, [half, half, one])
    assert out.eq(1 + 2.0**-23).all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_sum_into_one_of_its_parts(isa: str, place: int) -> None:
    parts = [values(333, torch.float32, seed) for seed in range(3)]
    want = (parts[0] + parts[1]) + parts[2]
    ops.sum_into(parts[place], parts)
    assert torch.equal(parts[place], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_into_widens_before_it_adds(isa: str, dtype: torch.dtype) -> None:
    """1 + 2^-9 is no bf16 and 1 + 2^-12 no fp16 number, but both are fp32 numbers."""
    small = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    out = torch.empty(19)
    ops.sum_into(out, [torch.ones(19, dtype=dtype), torch.full((19,), small, dtype=dtype)])
    assert out.eq(1 + small).all()


def test_sum_into_fp64(isa: str) -> None:
    parts = [values(129, torch.float64, seed) for seed in range(3)]
    out = torch.empty(129, dtype=torch.float64)
    ops.sum_into(out, parts)
    assert torch.equal(out, (parts[0] + parts[1]) + parts[2])


def test_sum_into_writes_nothing_beyond_its_end(isa: str) -> None:
    for size in range(1, 40):
        around = torch.full((size + 2,), 7.0)
        ops.sum_into(around[1 : 1 + size], [torch.ones(size), torch.ones(size)])
        assert around[0] == 7 and around[-1] == 7 and around[1:-1].eq(2).all()


@pytest.mark.parametrize("dtype", TYPES[:3])
@pytest.mark.parametrize("add", [False, True])
def test_divide_into_rounds_the_quotient_and_the_sum(
    isa: str, dtype: torch.dtype, add: bool
) -> None:
    """Both rounded to fp32 from fp64, where quotients and sums of fp32 numbers round alike."""
    for size in SIZES:
        for divisor in (1.0, 3.0, 16.0):
            part, start = values(size, dtype, 1), values(size, torch.float32, 2)
            out = start.clone()
            ops.divide_into(out, part, divisor, add=add)
            want = (part.double() / divisor).float()
            if add:
                want = (start.double() + want.double()).float()
            assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", TYPES[:3])
def test_divide_into_any_value(isa: str, dtype: torch.dtype) -> None:
    """Denormal numbers, infinities and NaN; what was in ``out`` is not looked at without add."""
    small = torch.finfo(dtype).smallest_normal / 4
    part = torch.tensor([math.inf, -math.inf, math.nan, small, -small, 0.0, 1.0] * 5).to(dtype)
    out = torch.full((35,), math.nan)
    ops.divide_into(out, part, 2.0, add=False)
    want = (part.double() / 2).float()
    assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0)) and out[3] != 0
    ops.divide_into(out, part, 2.0, add=True)
    assert torch.equal(out.nan_to_num(7.0), (2 * want).nan_to_num(7.0))


def test_divide_into_writes_nothing_beyond_its_end(isa: str) -> None:
    for size in range(1, 40):
        around = torch.full((size + 2,), 7.0)
        ops.divide_into(around[1 : 1 + size], torch.ones(size), 4.0, add=True)
        assert around[0] == 7 and around[-1] == 7 and around[1:-1].eq(7.25).all()


@pytest.mark.parametrize("threads", [2, 5])
def test_divide_into_with_threads(isa: str, threads: int) -> None:
    part, out = values(300_007, torch.bfloat16), values(300_007, torch.float32, 1)
    want = (out.double() + (part.double() / 3).float().double()).float()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        ops.divide_into(out, part, 3.0, add=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, want)


def test_wrong_arguments_are_named(isa: str) -> None:
    out = torch.zeros(4)
    with pytest.raises(TypeError, match="divide_into: out is bfloat16, expected float32"):
        ops.divide_into(out.bfloat16(), torch.zeros(4), 2.0, add=True)
    with pytest.raises(ValueError, match="divide_into: part has 3 elements, expected 4"):
        ops.divide_into(out, torch.zeros(3), 2.0, add=True)
    with pytest.raises(ValueError, match="out and part share memory"):
        ops.divide_into(out, out, 2.0, add=True)
    with pytest.raises(ValueError, match="parts is empty"):
        ops.sum_into(out, [])
    with pytest.raises(ValueError, match=r"parts\[1\] has 3 elements, expected 4"):
        ops.sum_into(out, [torch.zeros(4), torch.zeros(3)])
    with pytest.raises(TypeError, match=r"parts\[1\] is bfloat16, expected float32"):
        ops.sum_into(out, [torch.zeros(4), torch.zeros(4).bfloat16()])
    with pytest.raises(TypeError, match=r"parts\[0\] is float64"):
        ops.sum_into(out, [torch.zeros(4).double()])
    with pytest.raises(TypeError, match="out is bfloat16, expected float32 or float64"):
        ops.sum_into(out.bfloat16(), [torch.zeros(4)])
    base = torch.zeros(5)
    with pytest.raises(ValueError, match=r"parts\[1\] overlaps out"):
        ops.sum_into(base[:4], [torch.zeros(4), base[1:]])
    with pytest.raises(TypeError, match="t is int64"):
        ops.sum_squares(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="is not contiguous"):
        ops.sum_squares(torch.zeros(4, 4).t()[:2])
