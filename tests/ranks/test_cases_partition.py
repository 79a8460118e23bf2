"""Partitioned parameters: uneven loops, evaluation, shared use, several engines, (un)freezing.

The ids name published cases; values come from their text or from plain torch in one process.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from small import (
    MLP,
    STAGES,
    caught,
    furthest,
    mlp,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.engine import Engine


def adam_engine(module: nn.Module, stage: int, lr: float = 0.01, **keys: Any) -> Engine:
    trained = [p for p in module.parameters() if p.requires_grad]
    return Engine(module, torch.optim.AdamW(trained, lr=lr), settings(stage, **keys))


def part(t: Tensor) -> Tensor:
    return t.chunk(world())[rank()]


def uneven_loop(stage: int) -> dict[str, Any]:
    module = mlp(6, 8, 8, 3)
    engine = sgd_engine(module, stage, timeout=4.0 if stage == 3 else 40.0)
    x = torch.ones(2, 6)
    started, outputs = time.monotonic(), []

    def generate_and_train() -> None:
        with torch.no_grad():
            for _ in range(3 if rank() == 0 else 5):
                outputs.append(engine(x))
        engine.backward(engine(x).sum())
        engine.step()

    error = caught(generate_and_train)
    took = time.monotonic() - started
    reference = mlp(6, 8, 8, 3)(x).detach()
    right = all(torch.allclose(out, reference, atol=1e-6) for out in outputs)
    return {"error": error, "took": took, "right": right}


@pytest.mark.parametrize("stage", STAGES)
def test_z301_ranks_that_generate_for_different_lengths(ranks, stage):
    """Z3-01: 3 calls against 5. Right outputs; where parameters are whole the loops end, where they
    are sharded a timeout says where each rank is and how often it was there."""
    found = ranks(2)(uneven_loop, stage, timeout=40)
    assert all(each["right"] and each["took"] < 20 for each in found)
    if stage < 3:
        assert all(each["error"] == ("", "") for each in found)
        return
    # Rank 0 has called the model 3 times and once to train; its backward begins with the last
    # layer, for the fifth time. Rank 1 is at the first layer of its fifth call.
    waited = 0
    for r, (unit, count) in enumerate([("4", 5), ("0", 5)]):
        kind, message = found[r]["error"]
        assert kind == "CollectiveTimeout", message
        assert f"unit {unit}:" in message and f"gather {count} of this unit" in message, message
        in_time = f"no answer from rank {1 - r} within 4 s" in message
        assert in_time or f"connection to rank {1 - r} broke" in message, message
        waited += in_time
    # Both deadlines end at about the same moment; gloo breaks the connection at the first one.
    assert waited


class Trunk(nn.Module):
    """A trunk and a head that is called as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        for _ in range(times):
            x = torch.tanh(self.head(x))
        return x.sum()


def repeated_head(stage: int, cut: str) -> dict[str, Any]:
    module = Trunk()
    patience = 4.0 if stage == 3 and cut == "leaf" else 40.0
    engine = sgd_engine(module, stage, zero_unit=cut, timeout=patience)
    started = time.monotonic()
    error = caught(lambda: engine.backward(engine(torch.ones(2, 5), 1 + 2 * rank())))
    took = time.monotonic() - started
    grads = {} if error[0] else {n: engine.full_grad(p) for n, p in module.named_parameters()}
    return {"error": error, "took": took, "grads": grads}


@pytest.mark.parametrize("cut", ["block", "leaf"])
@pytest.mark.parametrize("stage", STAGES)
def test_z302_a_head_used_once_on_one_rank_and_thrice_on_the_other(ranks, stage, cut):
    """Z3-02: the mean of the local gradients. Only a head that is a sharded unit of its own, and so
    gathered at each use, ends in a timeout that names unit and count on either rank."""
    module = Trunk()
    for times in (1, 3):
        (module(torch.ones(2, 5), times) / 2).backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}
    found = ranks(2)(repeated_head, stage, cut, timeout=40)
    if stage == 3 and cut == "leaf":
        # Rank 0's backward has had the head and comes to the trunk a second time, while rank 1's
        # forward comes to the head a third time.
        for r, (unit, count) in enumerate([("trunk", 2), ("head", 3)]):
            kind, message = found[r]["error"]
            assert kind == "CollectiveTimeout", message
            assert f"unit {unit}:" in message and f"gather {count} of this unit" in message
            assert f"rank {1 - r}" in message
            assert found[r]["took"] < 20
        return
    for each in found:
        assert each["error"] == ("", "")
        assert furthest(each["grads"], wanted) <= 1e-6


def train_and_evaluate(stage: int, evaluate: bool) -> dict[str, Tensor]:
    module = mlp(6, 8, 8, 3)
    engine = adam_engine(module, stage)
    for x, y in regression(3, 8, 6, 3):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
        if evaluate:
            module.eval()
            with torch.no_grad():
                for size in (1, 3):  # two loaders, other batch sizes
                    for _ in range(2):
                        engine(torch.ones(size, 6))
            with torch.inference_mode():
                engine(torch.ones(2, 6))
            module.train()
            engine(torch.ones(2, 6))  # a forward without a backward (deepspeed 3.C 40)
    return engine.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_z304_evaluation_between_steps_changes_nothing(ranks, stage, num_ranks):
    """Z3-04, deepspeed 3.C 40: same bits with and without, and those of one process within 1e-6."""
    plain, mixed = (ranks(num_ranks)(train_and_evaluate, stage, how)[0] for how in (False, True))
    assert furthest(plain, mixed) == 0
    module = mlp(6, 8, 8, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    assert furthest(plain, plain_training(module, optimizer, regression(3, 8, 6, 3))) <= 1e-6


def backward_in_eval(stage: int, training: bool) -> dict[str, Tensor]:
    module = mlp(6, 8, 3).train(training)
    engine = sgd_engine(module, stage)
    engine.backward(engine(torch.ones(2, 6)).sum())
    return {n: engine.full_grad(p) for n, p in module.named_parameters()}


def test_z304_backward_in_eval_mode(ranks):
    """Z3-04: without dropout the mode does not matter for gradients."""
    for stage in STAGES:
        for a, b in zip(
            *(ranks(2)(backward_in_eval, stage, how) for how in (True, False)), strict=True
        ):
            assert furthest(a, b) == 0


def second_engine(stage: int) -> tuple[tuple[str, str], dict[str, Tensor], dict[str, Tensor]]:
    module = mlp(6, 8, 3)
    engine = sgd_engine(module, stage)
    x = torch.ones(2, 6)
    engine.backward(engine(x).sum())
    engine.step()
    error = caught(Engine, module, None, settings(stage))
    engine.backward(engine(x).sum())
    engine.step()
    alone = mlp(6, 8, 3)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone(x).sum().backward()
        optimizer.step()
    return error, engine.state_dict(), weights(alone)


@pytest.mark.parametrize("stage", STAGES)
def test_z305_a_second_engine_around_the_same_module(ranks, stage):
    """Z3-05: refused with a message that points to the first; training goes on as before."""
    found = ranks(2)(second_engine, stage)
    assert all(error[0] == "ModelError" and "engine" in error[1].lower() for error, *_ in found)
    assert furthest(found[0][1], found[0][2]) <= 1e-6


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(4, 3)
        self.other = nn.Linear(4, 3)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        return self.used(x) + (self.other(x) if both else 0.0)


def readable_gradients(stage: int, compute: str) -> dict[str, Tensor | None]:
    module = Partly()
    keys = {"scale_init": 1024.0} if compute == "fp16" else {}
    engine = sgd_engine(module, stage, compute=compute, **keys)
    x = torch.arange(4.0).reshape(1, 4) + rank()
    engine.backward(engine(x.to(engine.module.used.weight.dtype)).sum())
    return {n: engine.full_grad(p) for n, p in module.named_parameters()}


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_z313_gradients_are_readable(ranks, stage, compute):
    """Z3-13: whole, fp32, unscaled, averaged, on all ranks; None only for what was not used."""
    wanted = torch.arange(4.0).repeat(3, 1) + 0.5
    for grads in ranks(2)(readable_gradients, stage, compute):
        assert grads["other.weight"] is None and grads["other.bias"] is None
        assert grads["used.weight"].dtype == torch.float32
        assert torch.allclose(grads["used.weight"], wanted, atol=1e-6)
        assert torch.equal(grads["used.bias"], torch.ones(3))


def sometimes_unused(stage: int, kind: str) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    module = Partly()
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = make(module.parameters(), lr=0.05, weight_decay=0.1)
    engine = Engine(module, optimizer, settings(stage))
    found = []
    for i, (x, y) in enumerate(regression(5, 6, 4, 3)):
        engine.backward(F.mse_loss(engine(part(x), i % 2 == 0), part(y)))
        engine.step()
        found.append(engine.state_dict())
    return found, engine.optimizer_state_dict(optimizer)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_z314_parameters_unused_in_odd_steps(ranks, kind, num_ranks):
    """Z3-14: skipped as torch skips them (no decay, no moment), the same at every stage."""
    module = Partly()
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = make(module.parameters(), lr=0.05, weight_decay=0.1)
    wanted = []
    for i, (x, y) in enumerate(regression(5, 6, 4, 3)):
        optimizer.zero_grad()
        F.mse_loss(module(x, i % 2 == 0), y).backward()
        optimizer.step()
        wanted.append(weights(module))
    for stage in STAGES:
        found, state = ranks(num_ranks)(sometimes_unused, stage, kind)[0]
        for i in range(5):
            assert furthest(found[i], wanted[i]) <= 1e-6, f"stage {stage}, step {i}"
            if i % 2:
                assert torch.equal(found[i]["other.weight"], found[i - 1]["other.weight"])
        if kind == "adamw":
            counts = [float(state["state"][k]["step"]) for k in range(4)]
            assert counts == [5.0, 5.0, 3.0, 3.0]


def reload_in_place(stage: int, folder: str) -> tuple[dict[str, Tensor], ...]:
    module = mlp(6, 8, 3)
    engine = adam_engine(module, stage)
    batches = regression(6, 6, 6, 3)

    def train(some: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in some:
            engine.backward(F.mse_loss(engine(part(x)), part(y)))
            engine.step()

    train(batches[:3])
    saved = engine.state_dict()
    engine.save_checkpoint(folder)
    train(batches[4:])
    engine.load_checkpoint(folder)
    loaded = engine.state_dict()
    train(batches[3:])
    return saved, loaded, engine.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_z316_loading_a_checkpoint_in_the_middle_of_training(ranks, stage, tmp_path):
    """Z3-16: the weights are those saved; the next steps are those of an uninterrupted run."""
    saved, loaded, final = ranks(2)(reload_in_place, stage, str(tmp_path / "c"))[0]
    assert furthest(saved, loaded) == 0
    module = mlp(6, 8, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    assert furthest(final, plain_training(module, optimizer, regression(6, 6, 6, 3))) <= 1e-6


def thaw(module: MLP, i: int) -> None:
    module[2].requires_grad_(i >= 3)
    if i >= 6:
        module[0].requires_grad_(False)


def unfreeze(stage: int) -> tuple[dict[str, Tensor], Any]:
    module = MLP(6, 8, 3)
    for p, value in zip(module.parameters(), mlp(6, 8, 3).parameters(), strict=True):
        p.data.copy_(value)
    module[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = Engine(module, optimizer, settings(stage))
    for i, (x, y) in enumerate(regression(8, 6, 6, 3)):
        thaw(module, i)
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    return engine.state_dict(), engine.optimizer_state_dict(optimizer)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_z320_gradual_unfreezing_and_freezing(ranks, stage, num_ranks):
    """Z3-20: layer 2 trains from step 3 on, layer 1 until step 6: as torch does it, to 1e-6."""
    module = mlp(6, 8, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for i, (x, y) in enumerate(regression(8, 6, 6, 3)):
        thaw(module, i)
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    whole, state = ranks(num_ranks)(unfreeze, stage)[0]
    assert furthest(whole, weights(module)) <= 1e-6
    assert [float(state["state"][k]["step"]) for k in range(4)] == [6.0, 6.0, 5.0, 5.0]
