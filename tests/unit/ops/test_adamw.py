from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.ops.exact import Hyper, fp64_step, ulp
from tests.unit.ops.steps import within_one_ulp
from zeroexp import ops

State = tuple[Tensor, Tensor, Tensor, Tensor]


def make_state(size: int, seed: int = 0, grad_scale: float = 1e-3) -> State:
    """p, g, m, v of a run that has gone on for a while."""
    random = torch.Generator().manual_seed(seed)
    p = torch.randn(size, generator=random)
    g = torch.randn(size, generator=random) * grad_scale
    m = torch.randn(size, generator=random) * grad_scale
    v = torch.rand(size, generator=random) * grad_scale**2
    return p, g, m, v


def torch_step(state: State, h: Hyper, kind: type[torch.optim.Optimizer], **flavour: bool) -> State:
    p, g, m, v = state
    leaf = torch.nn.Parameter(p.clone())
    leaf.grad = g.clone()
    optimizer = kind(
        [leaf], lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay, **flavour
    )
    optimizer.state[leaf] = {
        "step": torch.tensor(float(h.step - 1)),
        "exp_avg": m.clone(),
        "exp_avg_sq": v.clone(),
    }
    optimizer.step()
    s = optimizer.state[leaf]
    return leaf.detach(), g, s["exp_avg"], s["exp_avg_sq"]


def our_step(state: State, h: Hyper, **options: object) -> State:
    p, g, m, v = (t.clone() for t in state)
    ops.adamw_(p, g, m, v, **asdict(h), **options)  # type: ignore[arg-type]
    return p, g, m, v


HYPERS = [
    Hyper(),
    Hyper(step=7, lr=3e-4, beta2=0.95, weight_decay=0.1),
    Hyper(step=1000, lr=1.0, weight_decay=0.0),
    Hyper(step=2, lr=0.1, beta1=0.0, beta2=0.0, eps=1e-3),
    Hyper(step=3, lr=0.1, beta1=0.3),
]


@pytest.mark.parametrize("h", HYPERS, ids=str)
@pytest.mark.parametrize("flavour", ["foreach", "fused", "loop"])
def test_one_ulp_of_torch_from_equal_state(isa: str, h: Hyper, flavour: str) -> None:
    state = make_state(10_007)
    flags = {"foreach": flavour == "foreach", "fused": flavour == "fused"}
    want = torch_step(state, h, torch.optim.AdamW, **flags)
    new = our_step(state, h)
    # The reference and torch's foreach and for-loop flavours call torch.sqrt, the kernels do not.
    exact_root = (flavour == "fused") == (isa != "reference")
    within_one_ulp(new[0], want[0], state[0], exact_root)
    for ours, theirs in ((new[2], want[2]), (new[3], want[3])):
        assert bool(((ours - theirs).abs().double() <= ulp(theirs)).all())


@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_close_to_the_formula_in_fp64(isa: str, h: Hyper) -> None:
    state = make_state(10_007)
    want_p, want_m, want_v = fp64_step(*state, h)
    p, _, m, v = our_step(state, h)
    # A moment is a sum of two terms that may cancel: its error is measured by the larger one.
    largest = torch.maximum(state[2].double().abs(), state[1].double().abs())
    update = h.lr / (1 - h.beta1**h.step) * largest
    update /= (want_v / (1 - h.beta2**h.step)).sqrt() + h.eps
    # Half a unit each for the decay, for its scalar and for the sum; ten roundings in the update.
    p_unit = ulp(torch.maximum(state[0].double().abs(), want_p.abs()))
    allowed = 1.5 * p_unit + 10 * update * 2.0**-24
    worst = ((p.double() - want_p).abs() / allowed).max()
    assert worst <= 1, f"{worst:.2f} of what is allowed"
    assert bool(((m.double() - want_m).abs() <= 3 * ulp(largest)).all())
    assert bool(((v.double() - want_v).abs() <= 3 * ulp(want_v)).all())


def test_adam_adds_the_decay_to_the_gradient(isa: str) -> None:
    h = Hyper(step=3, weight_decay=0.1)
    state = make_state(1003)
    want = torch_step(state, h, torch.optim.Adam, foreach=True)
    new = our_step(state, h, decoupled=False)
    within_one_ulp(new[0], want[0], state[0])


@pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="torch itself has no FMA here"
)
@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_bits_of_torchs_operations(isa: str, h: Hyper) -> None:
    """Stronger than the contract: on a machine with FMA the moments are torch's, bit for bit, and
    the parameter is too, given the correctly rounded square root."""
    if isa == "reference":
        pytest.skip("it is made of torch's operations")
    state = make_state(100_003)
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        want = torch_step(state, h, kind, foreach=True)
        new = our_step(state, h, decoupled=kind is torch.optim.AdamW)
        assert torch.equal(new[2], want[2])
        assert torch.equal(new[3], want[3])
        p = state[0].clone()
        if kind is torch.optim.AdamW:
            p.mul_(1 - h.lr * h.weight_decay)
        root = want[3].double().sqrt().float()
        denominator = root.div(math.sqrt(1 - h.beta2**h.step)).add(h.eps)
        p.addcdiv_(want[2], denominator, value=-h.lr / (1 - h.beta1**h.step))
        assert torch.equal(new[0], p)
        # torch's fused kernel handles the last few elements otherwise: compare whole vectors.
        fused = torch_step(state, h, kind, fused=True)
        assert torch.equal(new[0][:100_000], fused[0][:100_000])


@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy_type", [None, torch.float32, torch.bfloat16, torch.float16])
def test_no_cut_changes_a_bit(
    isa: str, grad_type: torch.dtype, copy_type: torch.dtype | None
) -> None:
    size = 60 * 97 + 13
    h = Hyper(step=4)
    p, g, m, v = make_state(size, grad_scale=1e-2)
    g = g.to(grad_type)
    whole = [t.clone() for t in (p, g, m, v)]
    copy = None if copy_type is None else torch.empty(size, dtype=copy_type)
    ops.adamw_(*whole, **asdict(h), grad_scale=0.3, copy_out=copy)
    for chunk in (1, 7, 60, 1024):
        parts = [t.clone() for t in (p, g, m, v)]
        part_copy = None if copy_type is None else torch.empty(size, dtype=copy_type)
        step = chunk if chunk > 1 else 1
        stop = size if chunk > 1 else 200
        for start in range(0, stop, step):
            cut = slice(start, start + step)
            low = None if part_copy is None else part_copy[cut]
            ops.adamw_(*(t[cut] for t in parts), **asdict(h), grad_scale=0.3, copy_out=low)
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one[:stop], other[:stop])
        if copy is not None and part_copy is not None:
            assert torch.equal(copy[:stop], part_copy[:stop])


@pytest.mark.parametrize("size", [*range(1, 131), 4099])
def test_odd_sizes_write_nothing_beyond_their_end(isa: str, size: int) -> None:
    """Elements around the slice keep their values; those inside equal the step of the whole."""
    h = Hyper(step=2)
    p, g, m, v = make_state(size + 10)
    want = our_step((p, g, m, v), h)
    parts = [t.clone() for t in (p, g, m, v)]
    low = torch.full((size + 10,), 7.0, dtype=torch.bfloat16)
    inside = slice(5, 5 + size)
    ops.adamw_(*(t[inside] for t in parts), **asdict(h), copy_out=low[inside])
    for new, old, wanted in zip(parts, (p, g, m, v), want, strict=True):
        assert torch.equal(new[inside], wanted[inside])
        assert torch.equal(new[:5], old[:5])
        assert torch.equal(new[5 + size :], old[5 + size :])
    assert torch.equal(low[inside], parts[0][inside].bfloat16())
    assert low[:5].eq(7).all() and low[5 + size :].eq(7).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    state = make_state(300_007)
    want = our_step(state, Hyper())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        new = our_step(state, Hyper())
    finally:
        torch.set_num_threads(before)
    for one, other in zip(want, new, strict=True):
        assert torch.equal(one, other)


@given(
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-45, 1e-39, 1e-20, 1.0, 1e19, 3e38]),
    seed=st.integers(0, 1000),
    step=st.integers(1, 10_000),
)
def test_denormal_and_huge_values_follow_torch(
    isa: str, size: int, scale: float, seed: int, step: int
) -> None:
    state = make_state(size, seed)
    state = (state[0], state[1].sign() * scale, state[2] * scale, (state[3] * scale).abs())
    h = Hyper(step=step)
    want = torch_step(state, h, torch.optim.AdamW, foreach=True)
    new = our_step(state, h)
    for ours, theirs in zip(new, want, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
    finite = want[0].isfinite()
    within_one_ulp(new[0][finite], want[0][finite], state[0][finite], exact_root=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_spoils_its_element_only(isa: str, bad: float) -> None:
    state = make_state(37)
    want = our_step(state, Hyper())
    state[1][20] = bad
    p, _, m, v = our_step(state, Hyper())
    others = torch.arange(37) != 20
    for new, old in ((p, want[0]), (m, want[2]), (v, want[3])):
        assert torch.equal(new[others], old[others])
        assert not new[20].isfinite()


@pytest.mark.parametrize("grad_type", [torch.bfloat16, torch.float16])
def test_every_low_precision_gradient_is_read_exactly(isa: str, grad_type: torch.dtype) -> None:
    """All 65536 bit patterns: with beta1 = 0 the first moment is the widened gradient."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    g = bits.view(grad_type)
    p, m, v = torch.zeros(g.numel()), torch.zeros(g.numel()), torch.zeros(g.numel())
    ops.adamw_(p, g, m, v, **asdict(Hyper(beta1=0.0)))
    want = g.float()
    finite = want.isfinite()
    assert torch.equal(m[finite], want[finite])
    assert not m[~finite].isfinite().any()


@pytest.mark.parametrize("copy_type", [torch.float32, torch.bfloat16, torch.float16])
def test_copy_rounds_to_nearest_even(isa: str, copy_type: torch.dtype) -> None:
    """Ties, near-ties, subnormals, the edge of overflow, inf, NaN: against torch's conversion."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    upper = (patterns << 16).view(torch.float32)
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    near = [upper, half.float(), torch.randn(4096) * 1e-6, torch.randn(4096) * 1e-41]
    values = torch.cat(near)
    nudged = [(values.view(torch.int32) + delta).view(torch.float32) for delta in (-1, 1)]
    ties = [
        (values.view(torch.int32) | mask).view(torch.float32) for mask in (0x8000, 0x1000, 0x7FFF)
    ]
    p = torch.cat([values, *nudged, *ties, torch.tensor([65519.99, 65520.0, -65520.0, 3.4e38])])
    before = p.clone()
    zero = torch.zeros_like(p)
    copy = torch.empty(p.numel(), dtype=copy_type)
    ops.adamw_(
        p, zero, zero.clone(), zero.clone(), **asdict(Hyper(weight_decay=0.0)), copy_out=copy
    )
    want = before.to(copy_type)
    numbers = ~before.isnan()
    word = torch.int16 if copy_type.itemsize == 2 else torch.int32
    assert torch.equal(copy[numbers].view(word), want[numbers].view(word))
    assert copy[~numbers].isnan().all()


def test_gradient_scale_is_applied_first(isa: str) -> None:
    p, g, m, v = make_state(1001)
    want = our_step((p, g * 0.125, m, v), Hyper())
    new = our_step((p, g, m, v), Hyper(), grad_scale=0.125)
    for ours, theirs in zip((new[0], new[2], new[3]), (want[0], want[2], want[3]), strict=True):
        assert torch.equal(ours, theirs)


# Published faults of comparable optimizers; the expected numbers are worked out by hand in fp64.


def run_scalar(
    isa: str, p: float, grads: list[float], h: dict[str, float], **options: bool
) -> float:
    state = torch.tensor([p]), torch.zeros(1), torch.zeros(1), torch.zeros(1)
    for step, grad in enumerate(grads, start=1):
        state[1].fill_(grad)
        hyper = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, **h}
        ops.adamw_(*state, step=step, **hyper, **options)  # type: ignore[arg-type]
    return float(state[0])


def test_case_op_01_groups_stepped_apart_stay_together(isa: str) -> None:
    """Three tensors of 5, 8 and 17 elements in calls of their own: the step is an argument."""
    hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    groups = [[torch.ones(n), torch.full((n,), 0.5), *torch.zeros(2, n)] for n in (5, 8, 17)]
    for step in range(1, 6):
        for group in groups:
            ops.adamw_(*group, step=step, **hyper)
    together = torch.cat([group[0] for group in groups])
    assert bool((together == together[0]).all())
    leaf = torch.nn.Parameter(torch.ones(30))
    optimizer = torch.optim.AdamW([leaf], lr=0.01, weight_decay=0.01, foreach=True)
    for _ in range(5):
        leaf.grad = torch.full((30,), 0.5)
        optimizer.step()
    torch.testing.assert_close(together, leaf.detach(), rtol=0, atol=1e-6)
    assert run_scalar(isa, 1.0, [0.5], {"lr": 0.01}) == pytest.approx(0.99, abs=1e-7)


def test_case_op_02_each_parameter_has_its_own_count(isa: str) -> None:
    assert run_scalar(isa, 1.0, [0.5] * 6, {"lr": 0.01}) == pytest.approx(0.940000001, abs=2e-7)
    assert run_scalar(isa, 1.0, [0.5] * 3, {"lr": 0.01}) == pytest.approx(0.970000001, abs=2e-7)


def test_case_op_04_decoupled_or_added_decay(isa: str) -> None:
    h = {"lr": 0.1, "weight_decay": 0.1}
    assert run_scalar(isa, 2.0, [0.0], h) == pytest.approx(1.98, abs=2e-7)
    assert run_scalar(isa, 2.0, [0.0], h, decoupled=False) == pytest.approx(1.900000005, abs=2e-7)


@pytest.mark.parametrize(
    ("grad", "want"), [(1e-9, 0.943298091), (1e-8, 0.821794000), (1e-7, 0.700289909)]
)
def test_case_op_11_epsilon_and_decay_order(isa: str, grad: float, want: float) -> None:
    result = run_scalar(isa, 1.0, [grad] * 3, {"lr": 0.1, "weight_decay": 0.1})
    # Three roundings of a parameter near 1, of half a unit (6e-8) each at most.
    assert result == pytest.approx(want, abs=1.8e-7)
    leaf = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([leaf], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        leaf.grad = torch.tensor([grad])
        optimizer.step()
    assert result == pytest.approx(leaf.item(), abs=1e-7)


def good_arguments() -> dict[str, Tensor]:
    return dict(zip("pgmv", make_state(8), strict=True))


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("p", torch.zeros(8, dtype=torch.float64), TypeError, "p is float64, expected float32"),
        ("g", torch.zeros(8, dtype=torch.int64), TypeError, "g is int64, expected float32 or"),
        ("m", torch.zeros(9), ValueError, "m has 9 elements, expected 8"),
        ("v", torch.zeros(16)[::2], ValueError, "v of shape (8,) and strides (2,)"),
        ("g", torch.zeros(8, device="meta"), TypeError, "g is on meta, expected the CPU"),
        (
            "copy_out",
            torch.zeros(8).double(),
            TypeError,
            "copy_out is float64, expected float32 or bfloat16 or float16",
        ),
        ("copy_out", torch.zeros(7).half(), ValueError, "copy_out has 7 elements, expected 8"),
    ],
)
def test_a_wrong_argument_is_named(
    isa: str, name: str, tensor: Tensor, error: type[Exception], message: str
) -> None:
    arguments = {**good_arguments(), name: tensor}
    with pytest.raises(error) as caught:
        ops.adamw_(**arguments, **asdict(Hyper()))  # type: ignore[arg-type]
    assert message in str(caught.value) and "adamw_" in str(caught.value)


def test_shared_memory_and_step_zero_are_refused(isa: str) -> None:
    arguments = good_arguments()
    with pytest.raises(ValueError, match="share memory"):
        ops.adamw_(**{**arguments, "m": arguments["p"]}, **asdict(Hyper()))
    with pytest.raises(ValueError, match=r"(p and copy_out|copy_out and p) share memory"):
        ops.adamw_(**arguments, copy_out=arguments["p"], **asdict(Hyper()))
    with pytest.raises(ValueError, match="steps count from 1"):
        ops.adamw_(**arguments, **asdict(Hyper(step=0)))
