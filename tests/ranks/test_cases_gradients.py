"""Gradients: division, reduction and accumulation, at every stage.

The ids name published cases; values come from their text or from plain torch in one process.
"""

from __future__ import annotations

import pytest
import torch
from small import (
    STAGES,
    Scalar,
    caught,
    furthest,
    micro_batches,
    mlp,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    step,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine

RANKS = (1, 2)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.w * x - y).square().mean()


def accumulated(stage: int, accumulate: int) -> tuple[float, list[float]]:
    engine = sgd_engine(Slope(), stage, accumulate=accumulate)
    norms = []
    ((x, y),) = regression(1, 16, 1, 1)
    for _ in range(5):
        for piece in micro_batches((x, y), accumulate):
            engine.backward(engine(*piece))
            engine.step()
        norms.append(float(engine.grad_norm))
    whole = engine.state_dict()
    return (float(whole["w"]) if whole else 0.0), norms


@pytest.mark.parametrize("stage", STAGES)
def test_ls07_accumulation_does_not_change_the_curve(ranks, stage):
    """LS-07: (8,1), (4,2), (1,8) on two ranks equal the full batch in one process."""
    ((x, y),) = regression(1, 16, 1, 1)
    w, norms = torch.tensor(0.5, dtype=torch.float64), []
    for _ in range(5):
        slope = float((2 * (w * x - y) * x).double().mean())
        norms.append(abs(slope))
        w = w - 0.1 * slope
    for accumulate in (1, 2, 8):
        found = ranks(2)(accumulated, stage, accumulate)
        assert found[0][0] == pytest.approx(float(w), abs=1e-6)
        for _, each in found:
            assert each == pytest.approx(norms, abs=1e-6)


def backward_twice(stage: int) -> tuple[tuple[str, str], float]:
    engine = sgd_engine(Scalar(0.0), stage)
    engine.backward(engine(2.0))
    engine.backward(engine(5.0))
    error = caught(engine.step)
    whole = engine.state_dict()
    return error, float(whole["w"]) if whole else 0.0


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ls08_backward_twice_before_a_step_accumulates_at_every_stage(ranks, num_ranks):
    """LS-08: 2w, then 5w, then a step of lr 0.1: -0.7 at every stage, never -0.5."""
    for stage in STAGES:
        error, w = ranks(num_ranks)(backward_twice, stage)[0]
        assert error == ("", "") and w == pytest.approx(-0.7, abs=1e-6), f"stage {stage}"


class Constant(nn.Module):
    """A linear layer whose weight gets the same gradient in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, slope: float) -> Tensor:
        return (self.layer.weight.float() * slope).sum()


def long_bf16(stage: int) -> tuple[Tensor, Tensor]:
    module = Constant().bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    engine = Engine(module, optimizer, settings(stage, compute="bf16"))
    for _ in range(200):
        engine.backward(engine(1e-3))
        engine.step()
    master = engine.state_dict()
    with zeroexp.gathered(module):
        return weights(module)["layer.weight"], master.get("layer.weight", torch.zeros(0))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ls10_bf16_trains_an_fp32_master(ranks, num_ranks):
    """LS-10: 200 AdamW steps below one bf16 ulp move the weights, the same way at every stage."""
    module = Constant().bfloat16().float()
    start = module.layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    for _ in range(200):
        module.layer.weight.grad = torch.full((64, 64), 1e-3).bfloat16().float()
        optimizer.step()
    wanted = module.layer.weight.detach()
    first = None
    for stage in STAGES:
        found = ranks(num_ranks)(long_bf16, stage)
        weight, master = found[0]
        assert weight.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert float((master - wanted).abs().max()) <= 1e-6
        assert torch.equal(weight, master.bfloat16())
        assert not torch.equal(weight.float(), start)
        first = weight if first is None else first
        assert all(torch.equal(each, first) for each, _ in found), f"stage {stage}"


def mean_of_ranks(stage: int) -> list[float]:
    engine = sgd_engine(Scalar(0.0, 0.0), stage, lr=1.0)
    step(engine, torch.tensor([1.0, 2.0]))
    whole = engine.state_dict()
    return whole["w"].tolist() if whole else []


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ds20_gradients_are_averaged_over_ranks(ranks, num_ranks):
    """deepspeed 3.B 20: zeros, x = [1,2] on every rank, SGD lr 1: -[1,2]."""
    for stage in STAGES:
        assert ranks(num_ranks)(mean_of_ranks, stage)[0] == [-1.0, -2.0]


def boundary_micro_batch(stage: int, reduce: str) -> list[float]:
    module = Scalar(0.0, 0.0, 0.0, 0.0, dtype=torch.bfloat16)
    engine = sgd_engine(module, stage, compute="bf16", accumulate=2, zero_reduce=reduce)
    first = torch.tensor([1.0, 3.0, 5.0, 7.0]) + 18 * rank()
    engine.backward(engine(first), last=False)
    engine.backward(engine(first + 10), last=True)
    return engine.full_grad(module.w).tolist()


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("stage", STAGES)
def test_ds22_the_boundary_micro_batch_is_reduced_too(ranks, stage, reduce):
    """deepspeed 3.B 22: bf16, fp32 accumulation, two micro-batches: [15,17,19,21] on both ranks."""
    wanted = [15.0, 17.0, 19.0, 21.0]
    assert ranks(2)(boundary_micro_batch, stage, reduce) == [wanted, wanted]


def powers_of_ten(stage: int, reduce: str) -> float:
    module = Scalar(0.0, dtype=torch.bfloat16)
    engine = sgd_engine(module, stage, lr=1.0, compute="bf16", accumulate=2, zero_reduce=reduce)
    for i in range(2):
        engine.backward(engine(float((rank() + 1) * 10**i)), last=i == 1)
    engine.step()
    with zeroexp.gathered(module):
        return float(module.w.detach())


@pytest.mark.parametrize("reduce", ["auto", "each", "last"])
@pytest.mark.parametrize("stage", STAGES)
def test_da02_no_micro_batch_stays_local(ranks, stage, reduce):
    """DA-02: ((1+10)+(2+20))/4 = 8.25 on all ranks (8.25 is a bf16 number)."""
    assert ranks(2)(powers_of_ten, stage, reduce) == [-8.25, -8.25]


def four_backwards(stage: int, accumulate: int) -> float:
    engine = sgd_engine(Scalar(0.0), stage, accumulate=accumulate)
    for i in range(4):
        engine.backward(engine(float(1 + i + 4 * rank())), last=i == 3)
    engine.step()
    whole = engine.state_dict()
    return float(whole["w"]) if whole else 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_da05_generic_accumulation_loop(ranks, stage):
    """DA-05: sums 10 and 26: -0.1 * 18 = -1.8 summed, a quarter when four micro-batches are set."""
    assert ranks(2)(four_backwards, stage, 1)[0] == pytest.approx(-1.8, abs=1e-6)
    assert ranks(2)(four_backwards, stage, 4)[0] == pytest.approx(-0.45, abs=1e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for index in use:
            x = torch.tanh(self.layers[index](x))
        return x.sum()


def unbalanced(stage: int, overlap: bool) -> dict[str, Tensor]:
    module = Branches()
    engine = sgd_engine(module, stage, zero_overlap=overlap)
    x = torch.arange(5.0) / (1 + rank())
    for _ in range(3):
        step(engine, x, (0, 1, 2) if rank() == 0 else (0, 2))
    return engine.state_dict()


@pytest.mark.parametrize("overlap", [True, False])
def test_ds23_parameters_unused_on_one_rank(ranks, overlap):
    """deepspeed 3.B 23: a rank that skips a layer counts as a zero gradient; nobody hangs."""
    module = Branches()
    for _ in range(3):
        module.zero_grad()
        for r, use in enumerate(((0, 1, 2), (0, 2))):
            (module(torch.arange(5.0) / (1 + r), use) / 2).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
    for stage in STAGES:
        whole = ranks(2)(unbalanced, stage, overlap)[0]
        assert furthest(whole, weights(module)) <= 1e-6, f"stage {stage}"


class Lookup(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(9, 4, sparse=sparse)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows).pow(2).sum()


def sparse_rows(stage: int, sparse: bool) -> list[Tensor]:
    module = Lookup(sparse)
    engine = sgd_engine(module, stage, accumulate=2)
    for i in range(2):
        engine.backward(engine(torch.tensor([1, 4, 4, 2 + 3 * rank() + i])), last=i == 1)
    return [engine.full_grad(module.table.weight)]


@pytest.mark.parametrize("stage", STAGES)
def test_ds29_sparse_embedding_gradients(ranks, stage):
    """deepspeed 3.B 29: sparse gradients give what dense ones give, row ids united."""
    sparse, dense = (ranks(2)(sparse_rows, stage, how) for how in (True, False))
    module = Lookup(False)
    for r in range(2):
        for i in range(2):
            (module(torch.tensor([1, 4, 4, 2 + 3 * r + i])) / 4).backward()
    for got in (*sparse, *dense):
        assert torch.allclose(got[0], module.table.weight.grad, atol=1e-6)


def bare_backward(stage: int, kind: str) -> list[Tensor]:
    module = mlp(6, 7, 3)
    engine = sgd_engine(module, stage)
    x = regression(1, 4, 6, 3)[0][0].chunk(world())[rank()]
    out = engine(x)
    if kind == "vector":
        out.backward(torch.full_like(out, 0.5))
    else:
        out.square().sum().backward()
    engine.finish_gradients()
    return [engine.full_grad(p) for p in module.parameters()]


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("stage", STAGES)
def test_ds59_backward_without_the_engine(ranks, stage, kind):
    """deepspeed 3.C 59: a bare backward (scalar, or with a gradient) averages as DDP does."""
    module = mlp(6, 7, 3)
    for x in regression(1, 4, 6, 3)[0][0].chunk(2):
        out = module(x)
        ((out * 0.5).sum() if kind == "vector" else out.square().sum()).div(2).backward()
    for grads in ranks(2)(bare_backward, stage, kind):
        for got, parameter in zip(grads, module.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad, atol=1e-6)


def boundary_pattern(stage: int) -> list[bool]:
    engine = sgd_engine(Scalar(0.0), stage, accumulate=4)
    moved, applied = [], []
    value = 0.0
    for i in range(8):
        engine.backward(engine(float(i + 1)))
        applied.append(engine.step())
        whole = engine.state_dict()
        now = float(whole["w"]) if whole else value
        moved.append(now != value)
        value = now
    return applied if rank() else moved


def test_ds61_managed_accumulation_steps_every_fourth_time(ranks):
    """deepspeed 3.C 61: parameters move in the pattern no, no, no, yes."""
    pattern = [False, False, False, True] * 2
    for stage in STAGES:
        assert ranks(2)(boundary_pattern, stage) == [pattern, pattern]


def coalesced(stage: int, reduce: str) -> dict[str, Tensor]:
    engine = sgd_engine(mlp(6, 7, 3), stage, accumulate=4, zero_reduce=reduce)
    for x, y in regression(3, 16, 6, 3):
        for a, b in micro_batches((x, y), 4):
            engine.backward((engine(a) - b).square().mean())
            engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_ds64_reducing_once_equals_reducing_each_time(ranks, stage):
    """deepspeed 3.C 64, 3.C 56: within 1e-6, and of one process with the whole batch."""
    each, last = (ranks(2)(coalesced, stage, how)[0] for how in ("each", "last"))
    module = mlp(6, 7, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wanted = plain_training(module, optimizer, regression(3, 16, 6, 3))
    assert furthest(each, last) <= 1e-6
    assert furthest(each, wanted) <= 1e-6


class MaybeBiased(nn.Linear):
    def forward(self, x: Tensor, bias: bool) -> Tensor:
        return F.linear(x, self.weight, self.bias if bias else None)


class Detour(nn.Module):
    """Each rank takes its own layers; some parameters of a layer may be left alone, too."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(MaybeBiased(5, 5) for _ in range(layers))

    def forward(self, x: Tensor, use: tuple[int, ...], bias: bool) -> Tensor:
        for index in use:
            x = torch.tanh(self.layers[index](x, bias))
        return x.sum()


EVERY = tuple(range(8))
DETOURS = ((EVERY, True), ((0, 6, 7), True), ((0, 7), True), (EVERY, False))
"""What ranks 0 to 3 do: all, two thirds skipped in the middle, almost all skipped, no biases."""


def detour(stage: int, overlap: bool, prefetch: int) -> dict[str, Tensor]:
    module = Detour()
    engine = sgd_engine(module, stage, zero_overlap=overlap, zero_prefetch=prefetch, timeout=20)
    x = torch.arange(5.0) / (1 + rank())
    for turn in range(4):
        step(engine, x, *DETOURS[(rank() + turn) % 4])
    return engine.state_dict()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("overlap", "prefetch"), [(True, 0), (True, 2), (False, 0)])
def test_ranks_that_skip_many_layers_do_not_wait_for_each_other(
    ranks, overlap, prefetch, num_ranks
):
    """A rank waits for a reduction in the middle of its backward, the peer that skipped those
    layers waits for the next gather: both must go on."""
    module = Detour()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for turn in range(4):
        optimizer.zero_grad()
        for number in range(num_ranks):
            x = torch.arange(5.0) / (1 + number)
            (module(x, *DETOURS[(number + turn) % 4]) / num_ranks).backward()
        optimizer.step()
    for stage in STAGES:
        found = ranks(num_ranks)(detour, stage, overlap, prefetch)[0]
        assert furthest(found, dict(module.state_dict())) <= 1e-6


def infinite_loss(stage: int, compute: str, constant: float) -> tuple[str, int, float, float]:
    module = Scalar(2.0)
    scale = {"scale_mode": "dynamic", "scale_init": 8.0, "scale_hysteresis": 1}
    keys = {"compute": compute, **scale} if compute == "fp16" else {}
    engine = sgd_engine(module, stage, **keys)
    loss = engine(3.0) + (constant if rank() == 1 else 0.0)
    engine.backward(loss)
    said = caught(engine.step)
    with zeroexp.gathered(module):
        value = module.w.item()
    return " ".join(said), engine.skipped_steps, value, float(engine.loss_scale)


@pytest.mark.parametrize("constant", [float("nan"), float("inf")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_is_no_step(ranks, stage, constant):
    """Its gradients may well be finite (a constant has none). Training on would end in "ok"."""
    for said, skipped, value, _ in ranks(2)(infinite_loss, stage, "fp32", constant):
        assert said.startswith("NonFiniteError") and "the loss is not finite on rank 1" in said
        assert (skipped, value) == (0, 2.0)
    for said, skipped, value, scale in ranks(2)(infinite_loss, stage, "fp16", constant):
        assert (said.strip(), skipped, value, scale) == ("", 1, 2.0, 4.0)
