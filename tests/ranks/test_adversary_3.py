"""What surrounds training: copies, edits, saved state, memory over many steps, and the end."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from adversary_lab import batches
from small import STAGES, caught, furthest, mlp, plain_training, rank, regression, settings, weights
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine


def part(t: Tensor) -> Tensor:
    return t.chunk(torch.distributed.get_world_size())[rank()]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()


def resumed(stage: int, half: dict[str, Any]) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    module.load_state_dict(half["model"])
    if rank() == 0 or half["everywhere"]:
        optimizer.load_state_dict(half["optimizer"])
    engine = Engine(module, optimizer, settings(stage))
    train(engine, regression(6, 8, 6, 2)[3:])
    return engine.state_dict()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_loaded_before_the_engine_counts(ranks, stage, everywhere):
    """torch's own way to resume: load module and optimizer, then wrap them. Moments that were
    dropped in silence would start again from zero."""
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    data = regression(6, 8, 6, 2)
    plain_training(module, optimizer, data[:3])
    half = copy.deepcopy({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = plain_training(module, optimizer, data[3:])
    found = ranks(2)(resumed, stage, {**half, "everywhere": everywhere})[0]
    assert furthest(found, wanted) <= 1e-6


def state_of_the_optimizer(stage: int) -> list[tuple[str, str]]:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    engine = Engine(module, optimizer, settings(stage))
    train(engine, regression(2, 8, 6, 2))
    return [caught(optimizer.state_dict), caught(optimizer.load_state_dict, {})]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_s_own_state_dict_is_refused(ranks, stage):
    """It would hold no moments: a checkpoint that looks complete and is not."""
    for kind, said in ranks(2)(state_of_the_optimizer, stage)[0]:
        assert kind == "OptimizerError"
        assert "optimizer_state_dict" in said


MATRICES: dict[str, Any] = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def reloaded(kind: str) -> dict[str, Tensor]:
    data = regression(6, 8, 6, 2)
    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
    module.load_state_dict({"0.weight": torch.ones(8, 6) / 9, "1.weight": torch.ones(2, 8) / 5})
    engine = Engine(module, MATRICES[kind](module.parameters()), settings(0))
    train(engine, data[:3])
    whole, moments = engine.state_dict(), engine.optimizer_state_dict(engine.optimizers[0])
    train(engine, data[3:])
    wanted = engine.state_dict()
    twin = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
    second = Engine(twin, MATRICES[kind](twin.parameters()), settings(0))
    second.load_state_dict(whole)
    second.load_optimizer_state_dict(second.optimizers[0], moments)
    train(second, data[3:])
    found = second.state_dict()
    return {n: found[n] - wanted[n] for n in found}


@pytest.mark.parametrize("kind", MATRICES)
def test_state_of_optimizers_over_matrices_can_be_loaded(ranks, kind):
    """Momentum has the parameter's shape again, factors of rows and columns have their own."""
    gaps = ranks(2)(reloaded, kind)[0]
    assert gaps and all(float(gap.abs().max()) == 0.0 for gap in gaps.values())


class Waves(nn.Module):
    """Random features in a buffer, as drawn by each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(rank())
        self.register_buffer("waves", torch.randn(4, 4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.head = nn.Linear(4, 1)


def buffers_of(stage: int) -> list[Tensor]:
    module = Waves()
    Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), settings(stage))
    return [module.waves.clone(), module.hidden.clone()]


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_begin_equal_on_all_ranks(ranks, stage):
    """Parameters are those of rank 0; features drawn by another rank do not fit them."""
    first, second = ranks(2)(buffers_of, stage)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def complex_parameters(stage: int) -> tuple[str, str]:
    module = Complex()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return caught(Engine, module, optimizer, settings(stage))


def test_complex_parameters_are_refused(ranks):
    """Real gradient buffers would drop the imaginary half of every gradient."""
    for stage in (0, 3):
        kind, said = ranks(2)(complex_parameters, stage)[0]
        assert kind == "ModelError"
        assert "view_as_complex" in said and "w" in said


def models_refused(stage: int) -> list[tuple[str, str]]:
    renormalizes = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 1))
    swapped = mlp(6, 8, 2)
    engine = Engine(swapped, adam(swapped), settings(0))
    swapped[2].bias.data = swapped[2].bias.data.clone()
    return [
        caught(Engine, renormalizes, adam(renormalizes), settings(stage)),
        caught(Engine, nn.LazyLinear(3), None, settings(stage)),
        caught(train, engine, regression(1, 8, 6, 2)),
    ]


def test_models_that_cannot_train_right_are_refused(ranks):
    """Rows rewritten by forward differ by rank; a lazy weight has no shape; a parameter with other
    memory is no longer the one that is stepped."""
    for stage in (0, 3):
        said = ranks(2)(models_refused, stage)[0]
        for (kind, text), word in zip(said, ("max_norm", "lazy", "2.bias"), strict=True):
            assert kind == "ModelError"
            assert word in text


def zero_grad_in_a_window(stage: int) -> list[bool]:
    module = mlp(6, 8, 2)
    engine = Engine(module, adam(module), settings(stage, accumulate=2))
    stepped = []
    for x in batches(4):
        engine.zero_grad()
        engine.backward(engine(part(x)).square().mean())
        stepped.append(engine.step())
    return stepped


def test_gradients_dropped_in_a_window_are_not_dropped_in_silence(ranks):
    """A loop written without accumulation would never step, and never say so."""
    run = ranks(2)
    assert run(zero_grad_in_a_window, 0)[0] == [False] * 4
    assert run.output[0].count("dropped 1 of 2 micro-batches") == 1
    assert "dropped" not in run.output[1]


def group_added_later(stage: int) -> tuple[str, str]:
    module = mlp(6, 8, 2)
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    engine = Engine(module, optimizer, settings(stage))
    optimizer.add_param_group({"params": list(module[2].parameters())})
    return caught(train, engine, regression(2, 8, 6, 2))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_added_after_the_engine_is_refused_or_trained(ranks, stage):
    """Its parameters have no place for gradients: they would never move."""
    kind, said = ranks(2)(group_added_later, stage)[0]
    assert kind == "OptimizerError" and "add_param_group" in said


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.a, self.b = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.b.weight = self.a.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.a(i)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.b(x).logsumexp(-1).mean()


def copies(stage: int) -> None:
    module = Tied()
    engine = Engine(module, adam(module), settings(stage))
    loss = engine(torch.arange(4))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.a.weight is twin.b.weight
        assert furthest(weights(twin), weights(Tied())) == 0.0
        twin(torch.arange(4)).backward()
    engine.backward(loss)
    engine.step()
    again = pickle.loads(pickle.dumps(module))
    whole = engine.state_dict()
    assert rank() or furthest(weights(again), whole) == 0.0
    assert furthest(weights(again), weights(twin)) > 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_copies_in_mid_training_keep_ties_and_values(ranks, stage):
    """A pickle must not untie weights, nor hold those of an earlier one."""
    ranks(2)(copies, stage)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def many_steps(stage: int) -> tuple[int, list[int], list[int]]:
    module = mlp(64, 256, 256, 8)
    engine = Engine(module, adam(module), settings(stage, zero_bucket=4096))
    latent = torch.zeros(64, requires_grad=True)
    held, objects = [], []
    for step in range(200):
        x = torch.full((2, 64), 0.1 * rank()) + latent
        with torch.no_grad():
            engine(x)
        out = engine(x)
        torch.autograd.grad(out.sum(), latent, retain_graph=True)
        engine.backward(out.square().mean())
        engine.step()
        if step == 50:
            gc.collect()
            before = resident()
        if step in (50, 199):
            gc.collect()
            objects.append(len(gc.get_objects()))
            kinds = ("params", "grads", "optim", "whole", "workspace")
            held.append(sum(engine.ledger.live_bytes(kind) for kind in kinds))
    return resident() - before, held, objects


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_nothing_grows_over_200_steps(ranks, stage):
    """Ledger, Python objects and resident memory are flat: nothing piles up per step."""
    for grown, (first, last), (few, many) in ranks(2)(many_steps, stage):
        assert first == last
        assert many - few < 200  # one object per step would be 150 at least
        assert grown < 4 << 20


def closed(stage: int) -> dict[str, Tensor]:
    module = mlp(6, 600, 600, 2)  # units above a megabyte, too
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    engine = Engine(module, optimizer, settings(stage))
    data = regression(6, 8, 6, 2)
    train(engine, data[:3])
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    plain_training(module, optimizer, data[3:])
    return weights(module)


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_without_the_engine(ranks, stage):
    """After close() the module is an ordinary one and the engine can be collected."""
    module = mlp(6, 600, 600, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    wanted = plain_training(module, optimizer, regression(6, 8, 6, 2))
    assert furthest(ranks(2)(closed, stage)[0], wanted) <= 1e-6


def edited(stage: int) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    engine = Engine(module, adam(module), settings(stage))
    data = regression(4, 8, 6, 2)
    train(engine, data[:2])
    with zeroexp.gathered(module, modify_rank=1), torch.no_grad():
        if rank() == 1:
            for p in module.parameters():
                p.mul_(0.5)
    train(engine, data[2:])
    return engine.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_in_mid_training(ranks, stage):
    """The edit of one rank is what all train on; the moments stay."""
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    data = regression(4, 8, 6, 2)
    plain_training(module, optimizer, data[:2])
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
    wanted = plain_training(module, optimizer, data[2:])
    assert furthest(ranks(2)(edited, stage)[0], wanted) <= 1e-6


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.at = mlp(6, 8, 8, 2), -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[1](self.net[0](x))
        if self.at == 1:
            raise KeyError("in forward")
        if x.requires_grad and self.at == 2:
            x.register_hook(self._fail)
        return self.net[4](self.net[3](self.net[2](x)))

    def _fail(self, grad: Tensor) -> None:
        raise KeyError("in backward")


def fails_and_goes_on(stage: int, bare: bool) -> dict[str, Tensor]:
    module = Fails()
    engine = Engine(module, adam(module), settings(stage, timeout=20))
    for step, x in enumerate(batches(4)):
        for module.at in (step % 3, -1):
            try:
                loss = engine(part(x)).square().mean()
                loss.backward() if bare else engine.backward(loss)
            except KeyError:
                engine.zero_grad()
                continue
            if module.at == -1:
                engine.step()
            else:
                engine.zero_grad()
    return engine.state_dict()


@pytest.mark.parametrize("bare", [False, True])
def test_a_failed_pass_leaves_no_trace(ranks, bare):
    """An exception in forward or backward, on all ranks: the retry trains as if nothing was."""
    module = Fails()
    optimizer = adam(module)
    for x in batches(4):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        found = ranks(2)(fails_and_goes_on, stage, bare)[0]
        assert furthest(found, weights(module)) <= 1e-6, stage
