"""What every update rule promises beside its values: cuts, threads, types, bad numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.ops.steps import STEPS, State, make_state, stepped, within_one_ulp
from zeroexp import ops
from zeroexp.ops import adagrad, adamw, lion, native, sgd

LOW = [torch.bfloat16, torch.float16]
TYPES = [torch.float32, *LOW]


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Any:
    return STEPS[request.param]


@pytest.mark.parametrize("grad_type", TYPES)
@pytest.mark.parametrize("copy_type", [None, *TYPES])
def test_no_cut_changes_a_bit(
    isa: str, step: Any, grad_type: torch.dtype, copy_type: torch.dtype | None
) -> None:
    size = 60 * 97 + 13
    p, g, s = make_state(size, grad_scale=1e-2)
    start = (p, g.to(grad_type), s)
    copy = None if copy_type is None else torch.zeros(size, dtype=copy_type)
    whole = stepped(step, start, grad_scale=0.3, copy_out=copy)
    for chunk, stop in ((1, 200), (7, size), (60, size), (1024, size)):
        parts = [t.clone() for t in start]
        part_copy = None if copy_type is None else torch.zeros(size, dtype=copy_type)
        for first in range(0, stop, chunk):
            cut = slice(first, first + chunk)
            low = None if part_copy is None else part_copy[cut]
            step(*(t[cut] for t in parts), grad_scale=0.3, copy_out=low)
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one[:stop], other[:stop])
        if copy is not None and part_copy is not None:
            assert torch.equal(copy[:stop], part_copy[:stop])


@pytest.mark.parametrize("copy_type", TYPES)
def test_odd_sizes_write_nothing_beyond_their_end(
    isa: str, step: Any, copy_type: torch.dtype
) -> None:
    """Elements around the unaligned slice keep their values; those inside step as in the whole."""
    for size in (*range(1, 67), 129, 4099):
        start = make_state(size + 10)
        want = stepped(step, start)
        parts = [t.clone() for t in start]
        low = torch.full((size + 10,), 7.0, dtype=copy_type)
        inside = slice(5, 5 + size)
        step(*(t[inside] for t in parts), copy_out=low[inside])
        for new, old, wanted in zip(parts, start, want, strict=True):
            assert torch.equal(new[inside], wanted[inside])
            assert torch.equal(new[:5], old[:5])
            assert torch.equal(new[5 + size :], old[5 + size :])
        assert torch.equal(low[inside], parts[0][inside].to(copy_type))
        assert low[:5].eq(7).all() and low[5 + size :].eq(7).all()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(isa: str, step: Any, threads: int) -> None:
    state = make_state(300_007)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = stepped(step, state)
        torch.set_num_threads(threads)
        new = stepped(step, state)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(want, new, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_spoils_its_element_only(isa: str, step: Any, bad: float) -> None:
    state = make_state(37)
    want = stepped(step, state)
    state[1][20] = bad
    p, _, s = stepped(step, state)
    others = torch.arange(37) != 20
    for new, old in ((p, want[0]), (s, want[2])):
        assert torch.equal(new[others], old[others])
    # The sign of an infinite update is a finite step; what Lion remembers is not finite.
    bounded = step is STEPS["lion"] and bad == bad
    assert bool(p[20].isfinite()) == bounded
    assert step is STEPS["sgd"] or not s[20].isfinite()


def specials(seed: int) -> State:
    """Every pair of a parameter and a gradient, of what is no ordinary number, 3 times over."""
    odd = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, math.inf, -math.inf, math.nan, 3.4e38, -1.0]
    pairs = torch.tensor(list(itertools.product(odd, odd)) * 3)
    random = torch.Generator().manual_seed(seed)
    pairs = pairs[torch.randperm(len(pairs), generator=random)]
    state = torch.tensor([0.0, 1e-45, 1e-39, 1.0, 3e38, math.inf, math.nan]).repeat(43)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), state[: len(pairs)].contiguous()


@pytest.mark.parametrize("grad_type", TYPES)
def test_special_values_step_as_in_torch(
    isa: str, step: Any, grad_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subnormal and huge numbers, signed zeros, infinities and NaN, at every place of a vector."""
    if isa == "reference":
        pytest.skip("it is what the kernels are compared with")
    p, g, s = specials(0)
    g = g.to(grad_type)
    copies = [torch.zeros(len(p), dtype=dtype) for dtype in TYPES]
    new = [stepped(step, (p, g, s), grad_scale=0.5, copy_out=copy) for copy in copies]
    chosen = native.select("reference")
    for module in (adagrad, adamw, lion, sgd):
        monkeypatch.setattr(module, "native", lambda: chosen)
    want = stepped(step, (p, g, s), grad_scale=0.5)
    for ours, theirs in ((new[0][0], want[0]), (new[0][2], want[2])):
        assert torch.equal(ours.isnan(), theirs.isnan())
        known = ~theirs.isnan()
        assert torch.equal(ours[known].isinf(), theirs[known].isinf())
        assert torch.equal(ours[known].signbit(), theirs[known].signbit())
    finite = want[0].isfinite() & p.isfinite()
    within_one_ulp(new[0][0][finite], want[0][finite], p[finite], exact_root=False)
    for (stepped_p, _, _), copy in zip(new, copies, strict=True):
        low = stepped_p.to(copy.dtype)
        numbers = ~low.isnan()
        assert torch.equal(copy[numbers], low[numbers])
        assert torch.equal(copy[numbers].signbit(), low[numbers].signbit())
        assert bool(copy[~numbers].isnan().all())


@pytest.mark.parametrize("grad_type", LOW)
def test_low_precision_gradients_are_read_exactly(
    isa: str, step: Any, grad_type: torch.dtype
) -> None:
    """All 65536 bit patterns step as the widened gradient does."""
    g = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(grad_type)
    p, _, s = make_state(g.numel())
    new, want = stepped(step, (p, g, s)), stepped(step, (p, g.float(), s))
    assert torch.equal(new[0].nan_to_num(7.0), want[0].nan_to_num(7.0))
    assert torch.equal(new[2].nan_to_num(7.0), want[2].nan_to_num(7.0))


@pytest.mark.parametrize("copy_type", TYPES)
def test_the_copy_is_the_rounded_parameter(isa: str, step: Any, copy_type: torch.dtype) -> None:
    p, g, s = make_state(4099)
    p[::3] *= 1e-6  # subnormal fp16 numbers
    copy = torch.zeros(4099, dtype=copy_type)
    new = stepped(step, (p, g, s), copy_out=copy)
    assert torch.equal(copy, new[0].to(copy_type))


def test_gradient_scale_is_applied_first(isa: str, step: Any) -> None:
    p, g, s = make_state(1001)
    want = stepped(step, (p, g * 0.3, s))
    new = stepped(step, (p, g, s), grad_scale=0.3)
    assert torch.equal(new[0], want[0]) and torch.equal(new[2], want[2])


@pytest.mark.parametrize("size", [0, 1])
def test_scalars_and_nothing(isa: str, step: Any, size: int) -> None:
    shape = (1,) * 2 if size else (0, 3)
    p, g, s = (torch.ones(shape) for _ in range(3))
    step(p, g, s)
    assert p.shape == shape and bool((p < 1).all())


@pytest.mark.parametrize(
    ("op", "state", "options"),
    [
        (ops.sgd_, "buffer", {"lr": 0.1, "momentum": 0.9}),
        (ops.adagrad_, "total", {"lr": 0.1, "step": 1}),
        (ops.lion_, "m", {"lr": 0.1, "beta1": 0.9, "beta2": 0.99}),
    ],
)
def test_a_wrong_argument_is_named(
    isa: str, op: Any, state: str, options: dict[str, float]
) -> None:
    good = {"p": torch.ones(8), "g": torch.ones(8), state: torch.ones(8)}
    wrong: list[tuple[str, Tensor, type[Exception], str]] = [
        ("p", torch.zeros(8).double(), TypeError, "p is float64, expected float32"),
        ("g", torch.zeros(8).long(), TypeError, "g is int64, expected float32 or bfloat16 or"),
        (state, torch.zeros(9), ValueError, f"{state} has 9 elements, expected 8"),
        (state, torch.zeros(16)[::2], ValueError, f"{state} of shape (8,) and strides (2,)"),
        (state, good["p"], ValueError, "share memory"),
        ("copy_out", torch.zeros(8).double(), TypeError, "copy_out is float64, expected float32"),
        ("copy_out", good["p"], ValueError, "share memory"),
        ("copy_out", good["g"][:8], ValueError, "share memory"),
    ]
    for name, tensor, error, message in wrong:
        with pytest.raises(error) as caught:
            op(**{**good, name: tensor}, **options)
        assert message in str(caught.value) and op.__name__ in str(caught.value)
