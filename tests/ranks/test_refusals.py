"""What cannot be trained right is refused before anything moves, with the same answer on all ranks.

Each rank function goes through all cases in one process, and trains at the end: a refusal leaves
the ranks in step.
"""

from __future__ import annotations

from typing import Any

import torch
from small import STAGES, caught, furthest, mlp, plain_training, rank, regression, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.engine import Engine


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def part(t: Tensor) -> Tensor:
    return t.chunk(world())[rank()]


def trained(engine: Engine, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    for x, y in batches:
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    return engine.state_dict()


DISAGREEMENTS = {
    "shape": "2.weight",
    "dtype": "0.bias",
    "count": "4.weight",
    "name": "4.weight",
    "requires_grad": "2.bias",
    "buffer shape": "table",
    "buffer dtype": "table",
    "buffer missing": "table",
}
"""How rank 1's model differs, and the parameter or buffer that every rank must then name."""


def other_model(how: str, odd: bool) -> nn.Module:
    """``mlp(6, 8, 3)`` on all ranks but the ``odd`` one."""
    module = mlp(6, 8, 4 if odd and how == "shape" else 3)
    if (how == "count" and odd) or how == "name":
        module.add_module("4" if odd else "5", nn.Linear(3, 2))
    if how.startswith("buffer") and not (odd and how == "buffer missing"):
        module.register_buffer("table", torch.zeros(5 if odd and how == "buffer shape" else 4))
    if odd and how == "dtype":
        module[0].bias.data = module[0].bias.data.double()
    if odd and how == "requires_grad":
        module[2].bias.requires_grad_(False)
    if odd and how == "buffer dtype":
        module.table = module.table.double()
    return module


def disagree(stage: int, odd: int) -> tuple[dict[str, tuple[str, str]], dict[str, Tensor]]:
    said = {}
    for how in DISAGREEMENTS:
        module = other_model(how, rank() == odd)
        said[how] = caught(Engine, module, sgd(module), settings(stage))
    module = mlp(6, 8, 3)
    return said, trained(Engine(module, sgd(module), settings(stage)), regression(2, 4, 6, 3))


def test_ranks_that_built_different_models(ranks):
    """deepspeed 3.C: shape, dtype, number, names, requires_grad or buffers differ on one rank: all
    ranks raise, name the first that differs, and stay in step."""
    module = mlp(6, 8, 3)
    wanted = plain_training(module, sgd(module), regression(2, 4, 6, 3))
    for stage in (0, 3):
        for odd in (0, 1):
            found = ranks(2)(disagree, stage, odd)
            for said, _ in found:
                for how, name in DISAGREEMENTS.items():
                    kind, text = said[how]
                    where = f"{how} differs on rank {odd} at stage {stage}: {kind} {text}"
                    assert kind == "RankMismatch", where
                    named = ("4.weight", "5.weight") if how == "name" else (name,)
                    assert any(each in text for each in named), where
                    assert "rank" in text, where
            assert furthest(found[0][1], wanted) <= 1e-6


def foreign(stage: int) -> dict[str, tuple[str, str]]:
    def build(optimizer: Any, module: nn.Module) -> tuple[str, str]:
        return caught(Engine, module, optimizer, settings(stage))

    module, other = mlp(6, 8, 3), nn.Linear(7, 5, bias=False)
    copied = mlp(6, 8, 3)  # the usual way: a model that was copied after its optimizer was made
    mixed = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    halves = [sgd(module[0]), sgd(module)]
    frozen = mlp(6, 8, 3).requires_grad_(False)
    said = {
        "one foreign": build(mixed, module),
        "all foreign": build(sgd(copied), module),
        "twice": build(halves, module),
        "frozen": build(torch.optim.SGD(frozen.parameters(), lr=0.1), frozen),
    }
    assert module[0].weight.shape == (8, 6) and bool(torch.isfinite(module[0].weight).all())
    return said


def test_optimizers_that_do_not_fit_the_model(ranks):
    """A foreign parameter is told by its shape, one held twice by its name; a model with nothing to
    train is no model to train. All at construction."""
    for stage in STAGES:
        for said in ranks(2)(foreign, stage):
            kind, text = said["one foreign"]
            assert kind == "OptimizerError" and "1 parameter" in text and "(5, 7)" in text
            kind, text = said["all foreign"]
            assert kind == "OptimizerError" and "4 parameter" in text and "(8, 6)" in text
            kind, text = said["twice"]
            assert kind == "OptimizerError" and "0.weight" in text
            kind, text = said["frozen"]
            assert kind == "ModelError" and "requires_grad" in text


def losses(stage: int) -> tuple[list[tuple[str, str]], bool, dict[str, Tensor]]:
    module = mlp(6, 8, 3)
    engine = Engine(module, sgd(module), settings(stage))
    before = engine.state_dict()
    x = torch.ones(2, 6)
    said = [
        caught(lambda: engine.backward(engine(x))),
        caught(lambda: engine.backward(3.0)),
        caught(lambda: engine.backward(engine(x).sum().detach())),
    ]
    with torch.no_grad():
        said.append(caught(engine.backward, engine(x).sum()))
    same = furthest(engine.state_dict(), before) == 0
    return said, same, trained(engine, regression(2, 4, 6, 3))


def test_losses_that_have_no_gradient(ranks):
    """Not a scalar (its shape is told), not a tensor, detached, made under no_grad: refused by
    name, and the engine trains on as if nothing was."""
    module = mlp(6, 8, 3)
    wanted = plain_training(module, sgd(module), regression(2, 4, 6, 3))
    for stage in STAGES:
        found = ranks(2)(losses, stage)
        for said, same, _ in found:
            assert [kind for kind, _ in said] == ["ModelError"] * 4
            for (_, text), word in zip(said, ("(2, 3)", "float", "graph", "graph"), strict=True):
                assert word in text
            assert same
        assert furthest(found[0][2], wanted) <= 1e-6
