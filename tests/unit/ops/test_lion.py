from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.exact import ulp
from tests.unit.ops.steps import State, make_state
from zeroexp import ops

HYPERS: list[dict[str, float]] = [
    {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99},
    {"lr": 0.1, "beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1},
    {"lr": 1.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 1.0},
    {"lr": 0.3, "beta1": 0.3, "beta2": 0.7},
]


def our_step(state: State, h: dict[str, float], **options: Any) -> State:
    p, g, m = (t.clone() for t in state)
    ops.lion_(p, g, m, **h, **options)
    return p, g, m


def check_against_fp64(state: State, new: State, h: dict[str, float]) -> None:
    """Algorithm 2 in fp64. Where the update all but cancels its sign is open: any of -1, 0, 1."""
    p, g, m = (t.double() for t in state)
    beta1, beta2, lr = h["beta1"], h["beta2"], h["lr"]
    update = beta1 * m + (1 - beta1) * g
    # Two products with rounded scalars and their sum; 2^-149 each where they are denormal.
    doubt = 4 * 2.0**-24 * (beta1 * m.abs() + (1 - beta1) * g.abs()) + 2 * 2.0**-149
    decayed = p * (1 - lr * h.get("weight_decay", 0.0))
    want = decayed - lr * update.sign()
    allowed = 1.5 * ulp(torch.maximum(p.abs(), want.abs()) + lr) + lr * 2.0**-24
    error = (new[0].double() - want).abs()
    clear = (update.abs() > doubt) | ((m == 0) & (g == 0))
    assert bool((error <= allowed)[clear].all())
    open_error = torch.stack(
        [(new[0].double() - decayed + lr * sign).abs() for sign in (-1.0, 0.0, 1.0)]
    ).amin(0)
    assert bool((open_error <= allowed).all())
    want_m = beta2 * m + (1 - beta2) * g
    largest = torch.maximum(m.abs(), g.abs())
    assert bool(((new[2].double() - want_m).abs() <= 2 * ulp(largest)).all())


@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_the_formula_in_fp64_from_equal_state(isa: str, h: dict[str, float]) -> None:
    p, g, m = make_state(10_007)
    state = (p, g, m * g.flip(0).sign())
    check_against_fp64(state, our_step(state, h), h)


@given(
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-45, 1e-39, 1e-20, 1.0, 1e19, 3e38]),
    seed=st.integers(0, 1000),
    h=st.sampled_from(HYPERS),
)
def test_denormal_and_huge_values(
    isa: str, size: int, scale: float, seed: int, h: dict[str, float]
) -> None:
    p, g, m = make_state(size, seed)
    state = (p, g.sign() * scale, (m - m.mean()).sign() * scale)
    check_against_fp64(state, our_step(state, h), h)


@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_kernels_give_the_bits_of_torchs_operations(isa: str, h: dict[str, float]) -> None:
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("torch itself has no FMA here")
    p, g, m = make_state(100_003)
    new = our_step((p, g, m), h)
    update = m.mul(h["beta1"]).add_(g, alpha=1 - h["beta1"]).sign_()
    p.mul_(1 - h["lr"] * h.get("weight_decay", 0.0)).add_(update, alpha=-h["lr"])
    m.mul_(h["beta2"]).add_(g, alpha=1 - h["beta2"])
    assert torch.equal(new[0], p) and torch.equal(new[2], m)


def test_signs_by_hand(isa: str) -> None:
    """Update -, 0, -0, +, inf, -inf, denormal; lr 1/4, no decay."""
    inf = float("inf")
    g = torch.tensor([-2.0, 0.0, -0.0, 3.0, inf, -inf, 1e-44])
    p, m = torch.ones(7), torch.zeros(7)
    ops.lion_(p, g, m, lr=0.25, beta1=0.5, beta2=0.5)
    assert torch.equal(p, torch.tensor([1.25, 1.0, 1.0, 0.75, 0.75, 1.25, 0.75]))
    assert torch.equal(m[:6], torch.tensor([-1.0, 0.0, 0.0, 1.5, inf, -inf]))


def test_what_is_no_number_reaches_the_parameter(isa: str) -> None:
    """An update that is NaN, by its gradient, its momentum, or inf - inf."""
    nan, inf = float("nan"), float("inf")
    p, g = torch.ones(4), torch.tensor([nan, 1.0, inf, 1.0])
    m = torch.tensor([0.0, nan, -inf, 1.0])
    ops.lion_(p, g, m, lr=0.25, beta1=0.5, beta2=0.5)
    assert bool(p[:3].isnan().all()) and p[3] == 0.75
