from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.ops.test_sums import values
from zeroexp import ops

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [*range(0, 67), 129, 65_535, 65_537, 140_003]


def bits(t: Tensor) -> Tensor:
    """Of numbers; any NaN is one."""
    return t.double().nan_to_num(7.0, math.inf, -math.inf).view(torch.int64)


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_scaled_rounded_and_summed(isa: str, dtype: torch.dtype, to: torch.dtype) -> None:
    """The product of two fp32 numbers is exact in fp64: rounded to fp32, then to the dtype."""
    for size in SIZES:
        for scale in (1.0, 0.3, 2.0**-20):
            part = values(size + 3, dtype, size)[3:]
            around = torch.full((size + 2,), 7.0, dtype=to)
            out = around[1:-1]
            norm = ops.scale_cast(out, part, scale)
            by = torch.tensor(scale).double()
            want = (part.double() * by).float().to(to)
            assert torch.equal(out, want)
            assert around[0] == 7 and around[-1] == 7
            assert norm == ops.sum_squares(out)
            squares = math.fsum(x * x for x in want.double().tolist())
            assert norm == pytest.approx(squares, rel=1e-13, abs=0)


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_value(isa: str, dtype: torch.dtype, to: torch.dtype) -> None:
    """Subnormal numbers of the dtype, signed zeros, infinities, NaN, what overflows on the way."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    odd = [0.0, -0.0, tiny, -tiny, math.inf, -math.inf, math.nan, torch.finfo(dtype).max, 1.0]
    part = torch.tensor(odd * 5).to(dtype)
    for scale in (1.0, -0.5, 1e4, 1e-42):
        out = torch.full((len(part),), math.nan, dtype=to)
        assert math.isnan(ops.scale_cast(out, part, scale))
        want = (part.double() * torch.tensor(scale).double()).float().to(to)
        assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_sum_tells_what_is_not_finite(isa: str, dtype: torch.dtype, to: torch.dtype) -> None:
    for size in (1, 16, 37, 70_000):
        for place in {0, size // 2, size - 1}:
            part = torch.ones(size, dtype=dtype)
            out = torch.empty(size, dtype=to)
            assert ops.scale_cast(out, part, 1.0) == size
            part[place] = math.inf
            assert ops.scale_cast(out, part, 1.0) == math.inf
            part[place] = math.nan
            assert math.isnan(ops.scale_cast(out, part, 1.0))


def test_what_overflows_on_the_way_is_not_finite(isa: str) -> None:
    part, out = torch.full((20,), 100.0), torch.empty(20, dtype=torch.float16)
    assert ops.scale_cast(out, part, 655.0) == 20 * 65504.0**2
    assert ops.scale_cast(out, part, 656.0) == math.inf


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_no_element_behind_the_end_counts(isa: str, scale: float) -> None:
    """0 times such a scale is NaN: what fills up the last vector is no part of the sum."""
    for size in range(0, 35):
        norm = ops.scale_cast(torch.empty(size), torch.ones(size), scale)
        want = scale if size else 0.0
        assert norm == want or (math.isnan(norm) and math.isnan(want))


@pytest.mark.parametrize("dtype", TYPES)
def test_in_place(isa: str, dtype: torch.dtype) -> None:
    for size in (*range(0, 35), 1000):
        t, out = values(size, dtype), torch.empty(size, dtype=dtype)
        norm = ops.scale_cast(out, t, 0.3)
        assert ops.scale_cast(t, t, 0.3) == norm
        assert torch.equal(t, out)


def test_threads_and_instruction_sets_change_no_bit(isa: str) -> None:
    """The bits of the documented order: 65536 elements at a time, 16 lanes, added in halves."""
    part = values(300_007, torch.float32)
    want = 0.0
    for block in (part * 0.3).double().square().split(65_536):
        lanes = torch.cat([block, torch.zeros(-len(block) % 16)]).view(-1, 16).cumsum(0)[-1]
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half:]
        want += float(lanes)
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.add(ops.scale_cast(torch.empty_like(part), part, 0.3))
    finally:
        torch.set_num_threads(before)
    if isa == "reference":  # torch's own sum may differ in the last bits of fp64
        assert max(results) == pytest.approx(want, rel=1e-14)
    else:
        assert results == {want}


def test_shapes_may_differ_and_scalars_work(isa: str) -> None:
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert ops.scale_cast(out, torch.full((6,), 3.0), 0.5) == 6 * 2.25 and out.eq(1.5).all()
    one = torch.tensor(3.0)
    assert ops.scale_cast(one, one, 2.0) == 36 and one == 6


def test_wrong_arguments_are_named(isa: str) -> None:
    out = torch.zeros(4)
    with pytest.raises(TypeError, match="scale_cast: out is float64, expected float32 or bfloat16"):
        ops.scale_cast(out.double(), torch.zeros(4), 1.0)
    with pytest.raises(TypeError, match="scale_cast: part is int64, expected float32"):
        ops.scale_cast(out, torch.zeros(4).long(), 1.0)
    with pytest.raises(ValueError, match="part has 3 elements, expected 4"):
        ops.scale_cast(out, torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="is not contiguous"):
        ops.scale_cast(out, torch.zeros(8)[::2], 1.0)
    base = torch.zeros(5)
    with pytest.raises(ValueError, match="share memory"):
        ops.scale_cast(base[:4], base[1:], 1.0)
    with pytest.raises(ValueError, match="share memory"):  # narrower writes overtake the reads
        ops.scale_cast(base.view(torch.bfloat16)[:4], base[:4], 1.0)
