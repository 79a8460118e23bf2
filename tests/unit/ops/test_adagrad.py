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
    {"step": 1, "lr": 0.01},
    {"step": 7, "lr": 0.1, "lr_decay": 0.5, "eps": 1e-3},
    {"step": 1000, "lr": 1.0, "lr_decay": 1e-3, "weight_decay": 0.1},
    {"step": 2, "lr": 1e-3, "weight_decay": 0.01},
]


def our_step(state: State, h: dict[str, Any], **options: Any) -> State:
    p, g, total = (t.clone() for t in state)
    ops.adagrad_(p, g, total, **h, **options)
    return p, g, total


def torch_step(state: State, h: dict[str, Any], **flavour: bool) -> State:
    keys = {k: v for k, v in h.items() if k != "step"}
    p, after = torch_stepped(
        state,
        lambda leaves: torch.optim.Adagrad(leaves, **keys, **flavour),
        step=torch.tensor(float(h["step"] - 1)),
        sum=state[2],
    )
    return p, state[1], after["sum"]


@pytest.mark.parametrize("h", HYPERS, ids=str)
@pytest.mark.parametrize("flavour", ["foreach", "fused", "loop"])
def test_one_ulp_of_torch_from_equal_state(isa: str, h: dict[str, Any], flavour: str) -> None:
    state = make_state(10_007)
    flags = {"foreach": flavour == "foreach", "fused": flavour == "fused"}
    want = torch_step(state, h, **flags)
    new = our_step(state, h)
    # The reference and torch's foreach and for-loop flavours call torch.sqrt, the kernels do not.
    exact_root = (flavour == "fused") == (isa != "reference")
    within_one_ulp(new[0], want[0], state[0], exact_root)
    assert bool(((new[2] - want[2]).abs().double() <= ulp(want[2])).all())


@pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="torch itself has no FMA here"
)
@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_bits_of_torchs_operations(isa: str, h: dict[str, Any]) -> None:
    """Stronger than the contract: on a machine with FMA the sum is torch's, bit for bit, and the
    parameter is too, given the correctly rounded square root."""
    if isa == "reference":
        pytest.skip("it is made of torch's operations")
    state = make_state(100_003)
    want = torch_step(state, h, foreach=False)
    new = our_step(state, h)
    assert torch.equal(new[2], want[2])
    p, g, _ = state
    if "weight_decay" in h:
        g = g.add(p, alpha=h["weight_decay"])
    denominator = want[2].double().sqrt().float().add(h.get("eps", 1e-10))
    rate = h["lr"] / (1 + (h["step"] - 1) * h.get("lr_decay", 0.0))
    assert torch.equal(new[0], p.addcdiv(g, denominator, value=-rate))


@pytest.mark.parametrize("h", HYPERS, ids=str)
def test_close_to_the_formula_in_fp64(isa: str, h: dict[str, Any]) -> None:
    state = make_state(10_007)
    p, g, total = (t.double() for t in state)
    decay = h.get("weight_decay", 0.0)
    lost = decay * p.abs() * 2.0**-23  # what g may lose: the roundings of the decay and of the sum
    lost += g.abs() * 2.0**-24
    g = g + decay * p
    total = total + g * g
    rate = h["lr"] / (1 + (h["step"] - 1) * h.get("lr_decay", 0.0))
    root = total.sqrt() + h.get("eps", 1e-10)
    want = p - rate * g / root
    new = our_step(state, h)
    allowed = ulp(torch.maximum(p.abs(), want.abs()))
    allowed += rate * (6 * g.abs() * 2.0**-24 + 2 * lost) / root
    assert bool(((new[0].double() - want).abs() <= allowed).all())
    assert bool(((new[2].double() - total).abs() <= ulp(total) + 2 * g.abs() * lost).all())


def test_two_steps_by_hand(isa: str) -> None:
    """Gradients 3 and 4: sums 9 and 25, steps of lr and of lr / (1 + 1) * 4 / 5."""
    p, total = torch.zeros(3), torch.zeros(3)
    for step, grad in ((1, 3.0), (2, 4.0)):
        ops.adagrad_(p, torch.full((3,), grad), total, step=step, lr=0.5, lr_decay=1.0, eps=0.0)
    assert total.eq(25).all()
    assert torch.allclose(p, torch.full((3,), -0.5 - 0.25 * 0.8), rtol=0, atol=6e-8)


@given(
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-45, 1e-39, 1e-20, 1.0, 1e19, 3e38]),
    seed=st.integers(0, 1000),
    h=st.sampled_from(HYPERS),
)
def test_denormal_and_huge_values_follow_torch(
    isa: str, size: int, scale: float, seed: int, h: dict[str, Any]
) -> None:
    p, g, total = make_state(size, seed)
    state = (p, g.sign() * scale, total * scale)
    want = torch_step(state, h, foreach=False)
    new = our_step(state, h)
    for ours, theirs in ((new[0], want[0]), (new[2], want[2])):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
    finite = want[0].isfinite()
    within_one_ulp(new[0][finite], want[0][finite], state[0][finite], exact_root=False)


def test_steps_count_from_one(isa: str) -> None:
    with pytest.raises(ValueError, match="adagrad_: step is 0; steps count from 1"):
        ops.adagrad_(torch.ones(3), torch.ones(3), torch.ones(3), step=0, lr=0.1)
