"""What is left when an engine ends: weights, optimizer state, and models that never were whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small import STAGES, caught, furthest, mlp, plain_training, rank, regression, settings, weights
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine

DATA = regression(8, 8, 6, 2)
BEFORE, AFTER = DATA[:4], DATA[4:]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
    """The same batch on every rank: the mean of equal gradients is that gradient, to the bit."""
    for x, y in data:
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()


def reference() -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    return plain_training(module, adam(module), DATA)


def goes_on_alone(stage: int) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    engine = Engine(module, optimizer, settings(stage))
    train(engine, BEFORE)
    engine.close()
    return plain_training(module, optimizer, AFTER)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_goes_on_without_its_engine(ranks, stage, num_ranks):
    """Moments that started again from zero would train on, only worse, and nobody would know."""
    for found in ranks(num_ranks)(goes_on_alone, stage):
        assert furthest(found, reference()) <= 1e-6


def goes_on_elsewhere(first: int, second: int, keep_sharded: bool) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    engine = Engine(module, optimizer, settings(first))
    train(engine, BEFORE)
    engine.close(keep_sharded=keep_sharded)
    engine = Engine(module, optimizer, settings(second))
    train(engine, AFTER)
    return engine.state_dict()


@pytest.mark.parametrize("keep_sharded", [False, True])
@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 1), (2, 0), (3, 0), (3, 3), (3, 1)])
def test_an_optimizer_goes_on_in_another_engine(ranks, first, second, keep_sharded):
    found = ranks(2)(goes_on_elsewhere, first, second, keep_sharded)[0]
    assert furthest(found, reference()) <= 1e-6


def saved_after_close(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    engine = Engine(module, optimizer, settings(stage))
    train(engine, BEFORE)
    from_engine = engine.optimizer_state_dict(optimizer)
    engine.close()
    return from_engine, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_its_state_dict_is_torchs_again(ranks, stage):
    answers = ranks(2)(saved_after_close, stage)
    wanted = answers[0][0]["state"]
    assert sorted(wanted) == list(range(len(list(mlp(6, 8, 2).parameters()))))
    for _, found in answers:
        for number, entry in wanted.items():
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(found["state"][number][key]), value), key


def lost_with_a_failure() -> str:
    module = mlp(6, 8, 2)
    optimizer = adam(module)
    engine = Engine(module, optimizer, settings(3))
    train(engine, BEFORE)
    engine.close(collective=False)
    return str(caught(optimizer.step)) + str(
        caught(lambda: Engine(module, adam(module), settings(3)))
    )


def test_after_a_failure_what_is_lost_is_said(ranks):
    for said in ranks(2)(lost_with_a_failure):
        assert "state was lost" in said
        assert "no memory" in said and "Build the model anew" in said


def born() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def born_sharded() -> dict[str, Any]:
    with zeroexp.sharded_init({"zero": {"stage": 3}}):
        module = born()
    engine = Engine(module, adam(module), settings(3))
    assert engine.model.born_sharded
    x = torch.ones(4, 6)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.close(keep_sharded=True)
    storage = sum(p.untyped_storage().nbytes() for p in module.parameters())
    with torch.no_grad():
        out = module(x)
    state = {n: t.clone() for n, t in module.state_dict().items()}
    storage_after = sum(p.untyped_storage().nbytes() for p in module.parameters())
    with zeroexp.gathered(module, modify_rank=1):
        if rank() == 1:
            next(module.parameters()).data.zero_()
    second = Engine(module, None, settings(2))
    edited = second.state_dict()
    return {
        "storage": (storage, storage_after),
        "out": out,
        "state": state,
        "edited": edited,
        "again": second(x).detach(),
    }


def test_a_model_that_never_was_whole_stays_sharded_and_works(ranks):
    module = born()
    optimizer = adam(module)
    x = torch.ones(4, 6)
    module(x).square().mean().backward()
    optimizer.step()
    wanted = weights(module)
    for found in ranks(2)(born_sharded):
        # Nothing but the placeholders' one element each.
        assert max(found["storage"]) <= 4 * len(wanted)
        assert furthest(found["state"], wanted) <= 1e-6
        assert torch.allclose(found["out"], module(x).detach(), atol=1e-6)
    first = next(iter(wanted))
    edited = ranks(2)(born_sharded)[0]["edited"]
    assert not edited[first].any()
    assert furthest({**edited, first: wanted[first]}, wanted) <= 1e-6
    with torch.no_grad():
        next(module.parameters()).zero_()
        for found in ranks(2)(born_sharded):
            assert torch.allclose(found["again"], module(x), atol=1e-6)


def narrow_edit(stage: int, compute: str, lr: float) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    scale = {"scale_mode": "static", "scale_init": 1.0} if compute == "fp16" else {}
    keys = settings(stage, compute=compute, precision_master="fp32", **scale)
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=lr), keys)
    x, y = DATA[0]
    engine.backward(F.mse_loss(engine(x).float(), y))
    engine.step()
    first = next(module.parameters())
    first.data[0].fill_(9)  # .data hides the change from version counters
    engine.backward(F.mse_loss(engine(x).float(), y))
    engine.step()
    return {
        "row": first.detach()[0].float(),
        "master": engine.state_dict().get("0.weight", torch.zeros(1)),
    }


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_of_narrow_parameters_are_kept(ranks, stage, compute):
    """GANs clamp weights, averaging writes them back: through ``.data``, in place. The fp32 master
    must follow, or the next step brings the old values back in silence."""
    for found in ranks(2)(narrow_edit, stage, compute, 0.0):
        assert (found["row"] == 9).all()
    master = ranks(2)(narrow_edit, stage, compute, 0.0)[0]["master"]
    start = mlp(6, 8, 2)[0].weight.detach()
    assert (master[0] == 9).all()
    assert torch.equal(master[1:], start[1:])  # what was not edited keeps its full width


def half_an_edit(stage: int) -> dict[str, Tensor]:
    module = mlp(6, 8, 2)
    engine = Engine(module, adam(module), settings(stage))
    assert engine.world_size == 2
    with pytest.raises(KeyError), zeroexp.gathered(module, modify_rank=0):
        for parameter in module.parameters():
            parameter.data.fill_(float(rank()))
            raise KeyError("in the middle")
    with pytest.raises(KeyError), zeroexp.gathered(module):
        with torch.no_grad():
            next(module.parameters()).fill_(5.0)
        raise KeyError("in the middle")
    with zeroexp.gathered(module):
        return weights(module)


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_that_raises_is_no_edit(ranks, stage):
    for found in ranks(2)(half_an_edit, stage):
        assert furthest(found, weights(mlp(6, 8, 2))) == 0


def penalty_outside(stage: int) -> str:
    module = mlp(6, 8, 2)
    engine = Engine(module, adam(module), settings(stage))
    x, y = DATA[0]
    loss = F.mse_loss(engine(x), y) + sum(p.square().sum() for p in module.parameters())
    engine.backward(loss)
    return str(caught(engine.step))


def test_a_penalty_outside_the_scope_is_explained(ranks):
    for said in ranks(2)(penalty_outside, 3):
        assert "engine.scope()" in said
