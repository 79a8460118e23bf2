"""Optimizer steps, counts and names: cases reported against other systems.

The ids name published cases; values come from their text or from plain torch in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import (
    STAGES,
    Scalar,
    furthest,
    mlp,
    plain_training,
    rank,
    regression,
    settings,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp import optim
from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.errors import ConfigError

KINDS = ("torch", "compiled")


def optim_config(**keys: Any) -> Any:
    return Config.from_mapping({"optim": keys}).optim


def adamw(
    kind: str,
    module: nn.Module,
    *,
    lr: float,
    decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """AdamW by torch, or the one that ``optim=adamw`` builds (the compiled kernel)."""
    if kind == "torch":
        return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=decay, betas=betas)
    config = optim_config(
        kind="adamw", lr=lr, weight_decay=decay, betas=list(betas), decay_norm_and_bias=True
    )
    return optim.build(config, module.named_parameters())


class Several(nn.Module):
    """Parameters of the given sizes, all 1.0; every element of the ``used`` ones gets slope."""

    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in numels)

    def forward(self, slope: float, used: tuple[int, ...]) -> Tensor:
        return sum((self.parts[i].float() * slope).sum() for i in used)


def equal_elements(stage: int, kind: str) -> list[dict[str, Tensor]]:
    module = Several(5, 8, 17)
    engine = Engine(module, adamw(kind, module, lr=0.01), settings(stage))
    out = []
    for _ in range(5):
        engine.backward(engine(0.5, (0, 1, 2)))
        engine.step()
        out.append(engine.state_dict())
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_op01_every_element_sees_the_same_step(ranks, kind, num_ranks):
    """OP-01: sizes 5, 8, 17, equal start and gradient: bitwise equal, and torch's within 1e-6."""
    reference = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.0)
    wanted = []
    for _ in range(5):
        reference.grad = torch.tensor([0.5])
        optimizer.step()
        wanted.append(float(reference.detach()))
    assert wanted[0] == pytest.approx(0.99, abs=1e-6)
    for stage in STAGES:
        for whole, value in zip(
            ranks(num_ranks)(equal_elements, stage, kind)[0], wanted, strict=True
        ):
            flat = torch.cat(list(whole.values()))
            assert len(flat) == 30 and len(flat.unique()) == 1, f"stage {stage}"
            assert float(flat[0]) == pytest.approx(value, abs=1e-6)


def uneven_histories(stage: int, kind: str) -> dict[str, Any]:
    module = Several(7, 9, 4)
    module.parts[2].data = module.parts[2].data.bfloat16()
    optimizer = adamw(kind, module, lr=0.01)
    engine = Engine(module, optimizer, settings(stage))
    for i in range(6):
        engine.backward(engine(0.5, (0, 1, 2) if i % 2 == 0 else (0, 2)))
        engine.step()
    found: dict[str, Any] = {
        "states": [engine.optimizer_state_dict(optimizer)],
        "whole": [engine.state_dict()],
    }

    def look() -> None:
        found["states"].append(engine.optimizer_state_dict(optimizer))
        found["whole"].append(engine.state_dict())

    def train(slope: float) -> None:
        engine.backward(engine(slope, (0, 1, 2)))
        engine.step()

    for _ in range(2):  # another way, which the reload must undo
        train(-2.0)
    look()
    engine.load_state_dict(found["whole"][0])
    engine.load_optimizer_state_dict(optimizer, found["states"][0])
    look()
    train(0.5)
    look()
    with zeroexp.gathered(module):
        found["live"] = module.parts[2].detach().clone()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_op02_each_parameter_counts_its_own_steps(ranks, stage, kind, num_ranks):
    """OP-02: p1 in six steps, p2 in three of them; counts 6 and 3, also after a reload that undoes
    two further steps: the next step is that of a run without them, for the bf16 parameter too."""
    values = {}
    for count in (3, 4, 6, 7):  # of p2 and p1, before and after one step more
        p = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=0.0)
        for _ in range(count):
            p.grad = torch.tensor([0.5])
            optimizer.step()
        values[count] = float(p.detach())
    found = ranks(num_ranks)(uneven_histories, stage, kind)[0]
    counts = ([6, 3, 6], [8, 5, 8], [6, 3, 6], [7, 4, 7])
    for state, count in zip(found["states"], counts, strict=True):
        assert [int(state["state"][i]["step"]) for i in range(3)] == count
        assert [state["state"][i]["exp_avg"].numel() for i in range(3)] == [7, 9, 4]
    saved, strayed, back, _ = found["states"]
    for i in range(3):
        for key in ("exp_avg", "exp_avg_sq"):
            a, b, c = (each["state"][i][key] for each in (saved, strayed, back))
            assert not torch.equal(a, b) and torch.equal(a, c), (i, key)
    assert furthest(found["whole"][1], found["whole"][0]) > 1e-3
    for at, first, second in ((0, 6, 3), (2, 6, 3), (3, 7, 4)):
        whole = found["whole"][at]
        assert torch.allclose(whole["parts.0"], torch.full((7,), values[first]), atol=1e-6)
        assert torch.allclose(whole["parts.1"], torch.full((9,), values[second]), atol=1e-6)
        # The bf16 parameter has a master in fp32, so it goes p1's way, and is rounded once.
        assert torch.allclose(whole["parts.2"], torch.full((4,), values[first]), atol=1e-6)
    assert torch.equal(found["live"], torch.full((4,), values[7]).bfloat16())


def after_six_steps(stage: int, kind: str) -> dict[str, Tensor]:
    module = Several(7, 9)
    engine = Engine(module, adamw(kind, module, lr=0.01), settings(stage))
    for i in range(6):
        engine.backward(engine(0.5, (0, 1) if i % 2 == 0 else (0,)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_op02_published_values(ranks, kind):
    """OP-02: p1 = 0.940000001, p2 = 0.970000001 (a shared counter would give 0.976576)."""
    for stage in STAGES:
        whole = ranks(2)(after_six_steps, stage, kind)[0]
        assert torch.allclose(whole["parts.0"], torch.full((7,), 0.940000001), atol=1e-6)
        assert torch.allclose(whole["parts.1"], torch.full((9,), 0.970000001), atol=1e-6)


def decay_only(stage: int, which: str) -> float:
    module = Scalar(2.0)
    if which == "torch AdamW":
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    elif which == "torch Adam":
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.1)
    else:
        config = optim_config(kind=which, lr=0.1, weight_decay=0.1, decay_norm_and_bias=True)
        optimizer = optim.build(config, module.named_parameters())
    engine = Engine(module, optimizer, settings(stage))
    engine.backward(engine(0.0))
    engine.step()
    whole = engine.state_dict()
    return float(whole["w"]) if whole else 0.0


@pytest.mark.parametrize(
    ("which", "value"),
    [("torch AdamW", 1.98), ("adamw", 1.98), ("torch Adam", 1.900000005), ("adam", 1.900000005)],
)
def test_op04_adam_and_adamw_are_what_their_names_say(ranks, which, value):
    """OP-04: w = 2, gradient 0, lr 0.1, decay 0.1: decoupled 1.98, L2 1.900000005."""
    for stage in STAGES:
        assert ranks(2)(decay_only, stage, which)[0] == pytest.approx(value, abs=1e-6)


def bf16_moments(stage: int, kind: str) -> dict[str, Any]:
    module = Scalar(*[0.0] * 1000, dtype=torch.bfloat16)
    optimizer = adamw(kind, module, lr=1e-3)
    engine = Engine(module, optimizer, settings(stage, compute="bf16"))
    source = torch.Generator().manual_seed(0)
    for _ in range(300):
        engine.backward(engine((torch.randn(1000, generator=source) * 1e-3).bfloat16()))
        engine.step()
    state = engine.optimizer_state_dict(optimizer)
    optim_bytes = sum(engine.ledger.state_bytes()["optim"].values())
    return {"state": state, "bytes": optim_bytes}


@pytest.mark.parametrize("kind", KINDS)
def test_op05_bf16_parameters_have_fp32_moments(ranks, kind):
    """OP-05: fp32 moments by default, second one within 1e-4 of fp32; 4+4+4 bytes per element."""
    source = torch.Generator().manual_seed(0)
    second = torch.zeros(1000, dtype=torch.float64)
    for _ in range(300):
        grad = (torch.randn(1000, generator=source) * 1e-3).bfloat16().double()
        second = 0.999 * second + 0.001 * grad * grad
    for stage in (0, 3):
        found = ranks(2)(bf16_moments, stage, kind)
        state = found[0]["state"]["state"][0]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert torch.allclose(state["exp_avg_sq"].double(), second, rtol=1e-4, atol=0)
        padded = 1024  # 1000 up to a multiple of 16 elements on each of 2 ranks
        assert [each["bytes"] for each in found] == [12 * padded // (2 if stage else 1)] * 2


def tiny_gradients(stage: int, kind: str, slope: float) -> float:
    module = Scalar(1.0)
    engine = Engine(module, adamw(kind, module, lr=0.1, decay=0.1), settings(stage))
    for _ in range(3):
        engine.backward(engine(slope))
        engine.step()
    whole = engine.state_dict()
    return float(whole["w"]) if whole else 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("slope", "value"), [(1e-9, 0.943298091), (1e-8, 0.821794000), (1e-7, 0.700289909)]
)
def test_op11_epsilon_and_decay_are_torchs(ranks, kind, slope, value):
    """OP-11: gradients of the size of eps, decay 0.1, lr 0.1, three steps; within 1e-7."""
    for stage in (0, 1, 3):
        assert ranks(2)(tiny_gradients, stage, kind, slope)[0] == pytest.approx(value, abs=1.2e-7)


def first_step(stage: int, kind: str) -> tuple[bool, float, int]:
    module = Scalar(2.0)
    optimizer = adamw(kind, module, lr=0.1, decay=0.5)
    engine = Engine(module, optimizer, settings(stage))
    start = engine.state_dict()
    engine.backward(engine(0.5))
    engine.step()
    whole, state = engine.state_dict(), engine.optimizer_state_dict(optimizer)
    if not whole:
        return True, 0.0, 0
    return float(start["w"]) == 2.0, float(whole["w"]), int(state["state"][0]["step"])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_op13_no_step_before_the_first(ranks, kind, num_ranks):
    """OP-13: w = 1.800000002 and step 1; a dummy step gives 1.7306, a shifted counter 1.8256."""
    for stage in STAGES:
        untouched, w, count = ranks(num_ranks)(first_step, stage, kind)[0]
        assert untouched and count == 1 and w == pytest.approx(1.800000002, abs=1e-6)


def test_op14_names_of_optimizers():
    """OP-14: every kind builds; an unknown one lists the valid ones; an unknown key is named."""
    module = nn.Linear(3, 3)
    for kind in ("adamw", "adam", "sgd", "lion", "adagrad", "rmsprop"):
        built = optim.build(optim_config(kind=kind), module.named_parameters())
        assert isinstance(built, torch.optim.Optimizer)
    for kind in ("cpu_adam", "Nadamm"):
        with pytest.raises(ConfigError) as told:
            optim_config(kind=kind)
        assert all(word in str(told.value) for word in ("adamw", "sgd", "lion", kind))
    for key in ("beta1", "amsgrad"):
        with pytest.raises(ConfigError, match=key):
            optim_config(**{key: True})


def decaying() -> list[tuple[Tensor, Tensor]]:
    """Batches whose gradients become small, so that the largest second moment is an old one."""
    return [(x * 0.3**i, y * 0.3**i) for i, (x, y) in enumerate(regression(6, 4, 4, 2))]


def amsgrad(stage: int) -> tuple[dict[str, Tensor], Any]:
    module = mlp(4, 5, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.9, 0.5), amsgrad=True)
    engine = Engine(module, optimizer, settings(stage))
    for x, y in decaying():
        a, b = (t.chunk(world())[rank()] for t in (x, y))
        engine.backward(F.mse_loss(engine(a), b))
        engine.step()
    return engine.state_dict(), engine.optimizer_state_dict(optimizer)


def test_op14_amsgrad_is_torchs(ranks):
    """OP-14: weights and largest second moments to 1e-6; plain Adam is further away."""
    ends = {}
    for switch in (True, False):
        module = mlp(4, 5, 2)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.9, 0.5), amsgrad=switch)
        ends[switch] = plain_training(module, optimizer, decaying())
        if switch:
            largest = {str(i): optimizer.state[p] for i, p in enumerate(module.parameters())}
            wanted = {i: state["max_exp_avg_sq"] for i, state in largest.items()}
    assert furthest(ends[True], ends[False]) > 1e-3
    for stage in STAGES:
        whole, state = ranks(2)(amsgrad, stage)[0]
        assert furthest(whole, ends[True]) <= 1e-6
        found = {str(i): s["max_exp_avg_sq"] for i, s in state["state"].items()}
        assert furthest(found, wanted) <= 1e-6


def groups(stage: int, kind: str) -> tuple[dict[str, Tensor], list[list[float]]]:
    module = mlp(6, 8, 3)
    optimizer = two_groups(kind, module)
    engine = Engine(module, optimizer, settings(stage))
    for x, y in regression(4, 6, 6, 3):
        a, b = (t.chunk(world())[rank()] for t in (x, y))
        engine.backward(F.mse_loss(engine(a), b))
        engine.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    faces = [[g["lr"], g["weight_decay"], len(g["params"])] for g in optimizer.param_groups]
    return engine.state_dict(), faces


def two_groups(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    listed: list[dict[str, Any]] = [
        {"params": decayed, "lr": 0.02, "weight_decay": 0.3},
        {"params": others, "lr": 0.005, "weight_decay": 0.0},
        {"params": [], "lr": 1.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(listed, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(listed, lr=0.1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_ds37_groups_keep_their_own_hyperparameters(ranks, kind, num_ranks):
    """deepspeed 3.C 37: own lr and decay, a change of lr between steps, an empty group."""
    module = mlp(6, 8, 3)
    optimizer = two_groups(kind, module)
    for x, y in regression(4, 6, 6, 3):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    for stage in STAGES:
        for whole, faces in ranks(num_ranks)(groups, stage, kind)[:1]:
            assert furthest(whole, weights(module)) <= 1e-6, f"stage {stage}"
            assert faces[0][0] == pytest.approx(0.02 / 16)
            assert [face[2] for face in faces[:2]] == [2, 2]
