"""Parameters that are born sharded, gathered and edited, saved and loaded.

Cases of deepspeed 3.C and 3.D and Z3 ids of published reports; values come from plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import (
    STAGES,
    caught,
    furthest,
    mlp,
    plain_training,
    rank,
    regression,
    settings,
    sgd_engine,
    tiny_gpt,
    token_batches,
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

import zeroexp
from zeroexp.engine import Engine


def part(t: Tensor) -> Tensor:
    return t.chunk(world())[rank()]


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    with zeroexp.gathered(module):
        return weights(module)


# -- born sharded --------------------------------------------------------------------------------
def nested_contexts() -> dict[str, Any]:
    config = settings(3)
    with zeroexp.sharded_init(config):
        with zeroexp.sharded_init(config):
            torch.manual_seed(0)
            inner = nn.Linear(3, 3)
        outer = nn.Linear(3, 3)
    after = nn.Linear(3, 3)
    return {
        "inner": gathered_weights(inner),
        "outer": [tuple(p.shape) for p in outer.parameters()],
        "after": [tuple(p.shape) for p in after.parameters()],
        "plain": bool(torch.isfinite(after.weight).all()) and type(after.weight) is nn.Parameter,
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_z307_nested_sharded_init(ranks, num_ranks):
    """Z3-07, deepspeed 3.C 43: contexts nest; a layer made after the exit is an ordinary one."""
    torch.manual_seed(0)
    wanted = weights(nn.Linear(3, 3))
    for found in ranks(num_ranks)(nested_contexts):
        assert furthest(found["inner"], wanted) == 0
        assert found["outer"] == found["after"] == [(3, 3), (3,)] and found["plain"]


def constructors() -> list[tuple[tuple[int, ...], float]]:
    with zeroexp.sharded_init(settings(3)):
        made = [torch.Tensor([63.0]), torch.Tensor(2, 3), torch.tensor([63.0]), torch.ones(2)]
    return [(tuple(t.shape), float(t.flatten()[0])) for t in made]


def test_z308_tensor_constructors_keep_their_meaning(ranks):
    """Z3-08: torch.Tensor of a list is its content, of two numbers a shape."""
    for first, second, third, fourth in ranks(2)(constructors):
        assert first == ((1,), 63.0) and third == ((1,), 63.0)
        assert second[0] == (2, 3) and fourth == ((2,), 1.0)


class Mixed(nn.Module):
    """Float and integer parameters and buffers, a module that is attached later."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3))
        self.ids = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("freqs", torch.linspace(0, 1, 4))
        nn.init.normal_(self.body[0].weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def born_sharded(stage: int) -> dict[str, Any]:
    config = settings(stage)
    torch.manual_seed(11 + 5 * rank())  # ranks that disagree about the seed: rank 0 decides
    with zeroexp.sharded_init(config):
        module = Mixed()
        late = nn.Linear(3, 3)
    module.late = late
    found = {
        "whole": gathered_weights(module),
        "ids": module.ids.tolist(),
        "count": int(module.count),
    }
    engine = sgd_engine(module, stage)
    found["adopted"] = gathered_weights(module)
    for x, y in regression(3, 4, 6, 3):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    return {**found, "trained": engine.state_dict()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ds43_a_model_born_sharded_has_the_values_of_a_plain_one(ranks, num_ranks):
    """deepspeed 3.C 43: the module's own init and seed, integers and buffers untouched."""
    torch.manual_seed(11)
    module = Mixed()
    module.late = nn.Linear(3, 3)
    start = weights(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    trained = plain_training(module, optimizer, regression(3, 4, 6, 3))
    results = ranks(num_ranks)(born_sharded, 3)
    blocks = [name for name in start if name.startswith("body.")]
    for found in results:
        assert furthest({n: found["whole"][n] for n in blocks}, {n: start[n] for n in blocks}) == 0
        assert furthest(found["adopted"], start) == 0
        assert found["ids"] == [0, 1, 2, 3, 4] and found["count"] == 7
    assert furthest(results[0]["whole"], start) == 0
    assert furthest({n: results[0]["trained"][n] for n in trained}, trained) <= 1e-6


# -- gathered ------------------------------------------------------------------------------------
def edit(stage: int, modify_rank: int | None) -> dict[str, Any]:
    module = mlp(6, 8, 3)
    engine = sgd_engine(module, stage)
    first = next(module.parameters())

    def write() -> None:
        with zeroexp.gathered([first], modify_rank=modify_rank), torch.no_grad():
            assert first.shape == (8, 6) and bool(torch.isfinite(first).all())
            if rank() == 0:
                first.fill_(0.25)

    error = caught(write)
    seen = gathered_weights(module)["0.weight"]
    x = torch.ones(2, 6)
    out = engine(x).detach()
    return {"error": error, "seen": seen, "out": out, "whole": engine.state_dict()}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_ds44_an_edit_by_one_rank_reaches_all(ranks, stage, num_ranks):
    """deepspeed 3.C 44: with modify_rank=0 every rank, the forward and state_dict see the edit."""
    module = mlp(6, 8, 3)
    with torch.no_grad():
        next(module.parameters()).fill_(0.25)
    for found in ranks(num_ranks)(edit, stage, 0):
        assert found["error"] == ("", "")
        assert torch.equal(found["seen"], torch.full((8, 6), 0.25))
        assert torch.allclose(found["out"], module(torch.ones(2, 6)), atol=1e-6)
        if found["whole"]:
            assert furthest(found["whole"], weights(module)) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_ds44_an_edit_without_modify_rank_is_never_half_kept(ranks, stage):
    """deepspeed 3.C 44: refused everywhere or without effect everywhere; ranks agree after it."""
    found = ranks(2)(edit, stage, None)
    assert torch.equal(found[0]["seen"], found[1]["seen"])
    assert torch.equal(found[0]["out"], found[1]["out"])
    assert len({each["error"][0] for each in found}) == 1


def padding_after_training(stage: int) -> float:
    """The largest absolute element of the flat buffers that belongs to no parameter."""
    module = tiny_gpt()
    trained = [p for p in module.parameters() if p.requires_grad]
    engine = Engine(module, torch.optim.AdamW(trained, lr=0.1, weight_decay=0.1), settings(stage))
    for tokens, targets in token_batches(3, 4):
        engine.backward(engine(part(tokens), part(targets)))
        engine.step()
    worst = 0.0
    with zeroexp.gathered(module):
        flats: dict[int, Tensor] = {}
        for p in module.parameters():
            storage = p.untyped_storage()
            whole = torch.empty(0).set_(storage)
            rest = flats.setdefault(storage.data_ptr(), whole.clone())
            rest[p.storage_offset() : p.storage_offset() + p.numel()] = 0.0
        assert sum(t.numel() for t in flats.values()) > sum(p.numel() for p in module.parameters())
        worst = max(float(rest.abs().max()) for rest in flats.values())
    return worst


def test_ds53_padding_stays_zero(ranks):
    """deepspeed 3.C 53, 2.7 m: what lies between and after parameters is zero after training."""
    for stage in STAGES:
        assert ranks(2)(padding_after_training, stage) == [0.0, 0.0]


def dictionaries(stage: int) -> dict[str, Any]:
    module = Buffered()
    engine = sgd_engine(module, stage)
    for x, y in regression(2, 4, 5, 5):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    ours = engine.state_dict()
    torchs = module.state_dict()
    engine.load_state_dict({n: torch.full_like(t, 2) for n, t in ours.items()} if ours else {})
    again = engine.state_dict()
    return {"ours": ours, "torchs": torchs, "keys": list(Buffered().state_dict()), "again": again}


class Buffered(nn.Module):
    """Tied, frozen and ordinary weights, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
        self.layers[1].weight = self.first.weight
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for layer in (self.first, *self.layers):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_ds52_state_dict_has_the_modules_keys_and_values(ranks, stage, num_ranks):
    """deepspeed 3.C 52: shared, frozen, buffers; the module's own state_dict is right, too."""
    module = Buffered()
    trained = [p for p in module.parameters() if p.requires_grad]
    plain_training(module, torch.optim.SGD(trained, lr=0.1), regression(2, 4, 5, 5))
    found = ranks(num_ranks)(dictionaries, stage)
    assert list(found[0]["ours"]) == found[0]["keys"]
    assert furthest(found[0]["ours"], module.state_dict()) <= 1e-6
    assert all(bool((t == 2).all()) for t in found[0]["again"].values())
    for each in found:
        assert list(each["torchs"]) == each["keys"]
        assert furthest(each["torchs"], module.state_dict()) <= 1e-6
    assert found[-1]["ours"] == {} or num_ranks == 1
