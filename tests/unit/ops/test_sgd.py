from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.exact import ulp
from tests.unit.ops.steps import State, make_state, torch_stepped, within_one_ulp
from zeroexp import ops

HYPERS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 1e-3, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
    {"lr": 1.0, "momentum": 0.99, "dampening": 1.0},
]
fma_in_torch = pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="torch itself has no FMA here"
)


def our_step(state: State, h: dict[str, Any], **options: Any) -> State:
    p, g, buffer = (t.clone() for t in state)
    ops.sgd_(p, g, buffer if "momentum" in h else None, **h, **options)
    return p, g, buffer


def torch_step(state: State, h: dict[str, Any], *, first: bool = False, **flavour: bool) -> State:
    held = {"momentum_buffer": state[2]} if "momentum" in h and not first else {}
    p, after = torch_stepped(state, lambda leaves: torch.optim.SGD(leaves, **h, **flavour), **held)
    return p, state[1], after.get("momentum_buffer", state[2])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("h", HYPERS, ids=str)
@pytest.mark.parametrize("flavour", ["foreach", "fused", "loop"])
def test_one_ulp_of_torch_from_equal_state(
    isa: str, h: dict[str, Any], flavour: str, first: bool
) -> None:
    state = make_state(10_007, grad_scale=1.0)
    flags = {"foreach": flavour == "foreach", "fused": flavour == "fused"}
    want = torch_step(state, h, first=first, **flags)
    new = our_step(state, h, first=first)
    within_one_ulp(new[0], want[0], state[0])
    # torch's fused kernel adds two rounded terms, which may cancel: the larger one is the measure.
    largest = torch.maximum(state[1].abs(), state[2].abs())
    assert bool(((new[2] - want[2]).abs().double() <= ulp(largest)).all())


@fma_in_torch
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_bits_of_torchs_operations(isa: str, h: dict[str, Any], first: bool) -> None:
    """Stronger than the contract: on a machine with FMA they are torch's, bit for bit."""
    state = make_state(100_003, grad_scale=1.0)
    for foreach in (False, True):
        want = torch_step(state, h, first=first, foreach=foreach)
        new = our_step(state, h, first=first)
        assert torch.equal(new[0], want[0]) and torch.equal(new[2], want[2])


@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_close_to_the_formula_in_fp64(isa: str, h: dict[str, Any]) -> None:
    state = make_state(10_007, grad_scale=1.0)
    p, g, buffer = (t.double() for t in state)
    momentum, decay = h.get("momentum", 0.0), h.get("weight_decay", 0.0)
    g = g + decay * p
    update = g
    terms = g.abs() + decay * p.abs()
    if momentum:
        buffer = momentum * buffer + (1 - h.get("dampening", 0.0)) * g
        update = g + momentum * buffer if h.get("nesterov") else buffer
        terms = terms + momentum * state[2].double()
    want = p - h["lr"] * update
    new = our_step(state, h)
    # A rounding each for: decay, momentum, their sum, two scalars, Nesterov's sum, lr.
    rounding = 7 * terms * 2.0**-24 * (1 + momentum)
    allowed = ulp(torch.maximum(p.abs(), want.abs())) + h["lr"] * rounding
    assert bool(((new[0].double() - want).abs() <= allowed).all())
    assert bool(((new[2].double() - buffer).abs() <= rounding).all())


def test_the_first_step_does_not_look_at_the_buffer(isa: str) -> None:
    p, g, _ = make_state(37)
    buffer = torch.full((37,), float("nan"))
    ops.sgd_(p, g, buffer, lr=0.1, momentum=0.9, dampening=0.5, first=True)
    assert torch.equal(buffer, g) and bool(p.isfinite().all())


def test_three_steps_by_hand(isa: str) -> None:
    """Gradient 1, momentum 1/2, lr 1/4: buffers 1, 3/2, 7/4; all exact in fp32."""
    p, g, buffer = torch.zeros(3), torch.ones(3), torch.zeros(3)
    for step in range(3):
        ops.sgd_(p, g, buffer, lr=0.25, momentum=0.5, first=step == 0)
    assert p.eq(-0.25 * (1 + 1.5 + 1.75)).all() and buffer.eq(1.75).all()
    p.zero_()
    for step in range(3):
        ops.sgd_(p, g, buffer, lr=0.25, momentum=0.5, nesterov=True, first=step == 0)
    assert p.eq(-0.25 * (1.5 + 1.75 + 1.875)).all()


def test_without_decay_an_infinite_parameter_does_not_become_nan(isa: str) -> None:
    p = torch.full((5,), float("inf"))
    ops.sgd_(p, torch.ones(5), lr=0.1)
    assert p.eq(float("inf")).all()


@given(
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-45, 1e-39, 1e-20, 1.0, 1e19, 3e38]),
    seed=st.integers(0, 1000),
    h=st.sampled_from(HYPERS),
)
def test_denormal_and_huge_values_follow_torch(
    isa: str, size: int, scale: float, seed: int, h: dict[str, Any]
) -> None:
    p, g, buffer = make_state(size, seed)
    state = (p * max(scale, 1e-40), g.sign() * scale, buffer.sign() * scale)
    want = torch_step(state, h, foreach=False)
    new = our_step(state, h)
    for ours, theirs in ((new[0], want[0]), (new[2], want[2])):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
    finite = want[0].isfinite()
    within_one_ulp(new[0][finite], want[0][finite], state[0][finite])


def test_momentum_needs_its_buffer(isa: str) -> None:
    for options in ({"momentum": 0.9}, {"nesterov": True}):
        with pytest.raises(ValueError, match="buffer is None, but"):
            ops.sgd_(torch.ones(3), torch.ones(3), lr=0.1, **options)  # type: ignore[arg-type]
