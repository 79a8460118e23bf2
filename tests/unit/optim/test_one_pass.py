"""The optimizers that run compiled kernels, against torch's own over several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroexp import optim
from zeroexp.config import Config
from zeroexp.errors import OptimizerError
from zeroexp.optim.adagrad import Adagrad
from zeroexp.optim.adamw import AdamW
from zeroexp.optim.lion import Lion
from zeroexp.optim.one_pass import OnePass
from zeroexp.optim.sgd import SGD

PAIRS: dict[str, tuple[Callable[..., OnePass], Callable[..., torch.optim.Optimizer], Any]] = {
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (
        SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    "nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
    "adagrad from": (
        Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.25, "eps": 1e-3},
    ),
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}),
}
SHAPES = [(5, 7), (13,), ()]


def start(dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64).to(dtype))
        for s in SHAPES
    ]


def grads(step: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(step + 1)
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in SHAPES]


def train(
    optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range, idle: int | None = None
) -> None:
    """Steps with gradients that depend on the step alone; parameter ``idle`` gets none."""
    for step in steps:
        for index, (p, g) in enumerate(zip(params, grads(step, params[0].dtype), strict=True)):
            p.grad = None if index == idle else g
        optimizer.step()


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    exact = ours[0].dtype != torch.float32
    for a, b in zip(ours, theirs, strict=True):
        tolerance = 0.0 if exact else 1e-6
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PAIRS)
def test_steps_like_torchs(name: str, dtype: torch.dtype) -> None:
    """fp64 takes torch's operations: the same bits. A parameter without a gradient is left alone.

    The fp32 bound is a few roundings of parameters near 1, of 6e-8 each.
    """
    ours, theirs, options = PAIRS[name]
    a, b = start(dtype), start(dtype)
    mine, its = ours(a, **options), theirs(b, **options, foreach=False)
    for optimizer, params in ((mine, a), (its, b)):
        train(optimizer, params, range(2))
        train(optimizer, params, range(2, 4), idle=1)
        train(optimizer, params, range(4, 5))
    assert_near(a, b)
    for p, q in zip(a, b, strict=True):
        assert dict(mine.state.get(p, {})).keys() == dict(its.state.get(q, {})).keys()
        for key, value in its.state.get(q, {}).items():
            torch.testing.assert_close(mine.state[p][key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "adamw"])
def test_state_of_torchs_optimizer_is_continued(name: str) -> None:
    """Both ways: torch goes on from ours, ours from torch's."""
    ours, theirs, options = PAIRS[name]
    want = start(torch.float32)
    train(theirs(want, **options), want, range(5))
    for first, second in ((theirs, ours), (ours, theirs)):
        params = start(torch.float32)
        before = first(params, **options)
        train(before, params, range(3))
        after = second(params, **options)
        saved = before.state_dict()
        for group, own in zip(saved["param_groups"], after.param_groups, strict=True):
            group.update({k: v for k, v in own.items() if k not in (*options, "params")})
        after.load_state_dict(saved)
        train(after, params, range(3, 5))
        assert_near(params, want)


def test_a_buffer_of_none_is_a_first_step() -> None:
    """torch.optim.SGD of some versions saves None where there was no momentum yet."""
    params = start(torch.float32)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        optimizer.state[p]["momentum_buffer"] = None
    train(optimizer, params, range(1))
    for p, g in zip(params, grads(0, torch.float32), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], g)


def test_plain_sgd_keeps_no_state() -> None:
    params = start(torch.float32)
    optimizer = SGD(params, lr=0.1)
    train(optimizer, params, range(2))
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_is_algorithm_2(dtype: torch.dtype) -> None:
    params = start(dtype)
    want = [p.detach().clone().double() for p in params]
    optimizer = Lion(params, lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    momentum = [torch.zeros_like(w) for w in want]
    train(optimizer, params, range(5))
    for step in range(5):
        for i, g in enumerate(g.double() for g in grads(step, dtype)):
            update = (0.5 * momentum[i] + 0.5 * g).sign()
            want[i] = want[i] - 0.25 * (update + 0.125 * want[i])
            momentum[i] = 0.75 * momentum[i] + 0.25 * g
    for p, w, m in zip(params, want, momentum, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=2e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("copy_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [SGD, Adagrad, Lion, AdamW])
def test_scale_and_copy_in_the_same_pass(
    make: Callable[..., OnePass], copy_type: torch.dtype, dtype: torch.dtype
) -> None:
    """A power of two scales without rounding, so the steps are those of scaled gradients."""
    plain, fused = start(dtype), start(dtype)
    expected, optimizer = make(plain, lr=0.1), make(fused, lr=0.1)
    low = [torch.zeros(s, dtype=copy_type) for s in SHAPES]
    optimizer.grad_scale = 0.25
    optimizer.copy_out = dict(zip(fused, low, strict=True))
    for p, q, g in zip(plain, fused, grads(0, dtype), strict=True):
        p.grad, q.grad = 0.25 * g, g
    expected.step()
    optimizer.step()
    for p, q, copy in zip(plain, fused, low, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(copy, q.detach().to(copy_type))


def test_the_closure_is_evaluated_with_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.5)

    def closure() -> Tensor:
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3 and p.detach().eq(0).all()


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.1)])
def test_nesterov_needs_momentum_and_no_dampening(momentum: float, dampening: float) -> None:
    with pytest.raises(OptimizerError, match="momentum above 0 and no dampening"):
        SGD(start(torch.float32), momentum=momentum, dampening=dampening, nesterov=True)


@pytest.mark.parametrize(
    ("kind", "built"),
    [
        ("adamw", AdamW),
        ("adam", AdamW),
        ("sgd", SGD),
        ("adagrad", Adagrad),
        ("lion", Lion),
        ("rmsprop", torch.optim.RMSprop),
    ],
)
def test_what_a_kind_builds(kind: str, built: type) -> None:
    config = Config.from_mapping({"optim": {"kind": kind, "lr": 0.125}}).optim
    optimizer = optim.build(config, torch.nn.Linear(3, 3).named_parameters())
    assert type(optimizer) is built
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]
