"""What the ``optim`` section builds beside AdamW, at every stage, against torch's optimizers."""

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
    weights,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp import optim
from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.optim.adamw import AdamW

BUILT: dict[str, tuple[dict[str, Any], int]] = {
    "sgd": ({"kind": "sgd", "lr": 0.05, "weight_decay": 0.1}, 0),
    "momentum": ({"kind": "sgd", "lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}, 1),
    "adagrad": ({"kind": "adagrad", "lr": 0.05, "weight_decay": 0.1}, 1),
    "lion": ({"kind": "lion", "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99]}, 1),
}
"""What the optim section builds, and its state tensors per parameter."""


def built(stage: int, kind: str, compute: str) -> dict[str, Any]:
    """Clipped steps of whole weights, with the state saved and loaded in the middle."""
    module = mlp(6, 7, 5, 3)
    optimizer = optim.build(
        Config.from_mapping({"optim": BUILT[kind][0]}).optim, module.named_parameters()
    )
    engine = Engine(module, optimizer, settings(stage, compute=compute, clip=0.5))
    for count, (x, y) in enumerate(regression(6, 8, 6, 3)):
        a, b = (t.chunk(world())[rank()] for t in (x, y))
        engine.backward(F.mse_loss(engine(a).float(), b))
        engine.step()
        if count == 2:
            engine.load_optimizer_state_dict(optimizer, engine.optimizer_state_dict(optimizer))
    state = engine.optimizer_state_dict(optimizer)
    return {"whole": engine.state_dict(), "state": state.get("state", {})}


def by_torch(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """What torch has under that name; for Lion the formula of its paper, in this file."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "lion":
        return PaperLion(groups)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.05, eps=1e-8)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


class PaperLion(torch.optim.Optimizer):
    """arXiv:2302.06675, algorithm 2, line by line; lr 0.01, betas 0.9 and 0.99."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                update = torch.sign(0.9 * m + 0.1 * p.grad)
                p -= 0.01 * (update + group["weight_decay"] * p)
                self.state[p]["m"] = 0.99 * m + 0.01 * p.grad


@pytest.mark.parametrize("kind", BUILT)
def test_built_optimizers_follow_torch_at_every_stage(ranks, kind):
    """Two ranks: the same bits at stages 0-3, and one process of torch but for rounding."""
    module = mlp(6, 7, 5, 3)
    wanted = plain_training(module, by_torch(kind, module), regression(6, 8, 6, 3), clip=0.5)
    first: dict[str, Tensor] = {}
    for stage in STAGES:
        found = ranks(2)(built, stage, kind, "fp32")[0]
        first = first or found["whole"]
        assert furthest(found["whole"], first) == 0, f"stage {stage}"
        assert furthest(found["whole"], wanted) <= 1e-6, f"stage {stage}"
        for entry in found["state"].values():
            per_element = [t for t in entry.values() if isinstance(t, Tensor) and t.dim() > 0]
            assert len(per_element) == BUILT[kind][1]
        assert len(found["state"]) == (6 if BUILT[kind][1] else 0)


def gradients_seen(stage: int, kind: str) -> set[torch.dtype]:
    """The dtypes of the gradients that the optimizer is given."""
    module = mlp(6, 7, 3)
    optimizer = optim.build(
        Config.from_mapping({"optim": {"kind": kind}}).optim, module.named_parameters()
    )
    seen: set[torch.dtype] = set()
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.update(p.grad.dtype for g in o.param_groups for p in g["params"])
    )
    keys = {"compute": "bf16", "precision_accumulate": "bf16"}
    engine = Engine(module, optimizer, settings(stage, **keys))
    engine.backward(engine(torch.ones(2, 6)).float().sum())
    engine.step()
    return seen


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch wants the dtype of the parameter"
)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad", "lion", "rmsprop"])
def test_gradients_summed_in_bf16_are_not_widened_first(ranks, kind):
    """The kernels read them as they are; torch's RMSprop needs them like its parameters."""
    wanted = torch.float32 if kind == "rmsprop" else torch.bfloat16
    for stage in STAGES:
        assert ranks(2)(gradients_seen, stage, kind)[0] == {wanted}


@pytest.mark.parametrize("kind", BUILT)
def test_built_optimizers_step_the_master_of_bf16_parameters(ranks, kind):
    """Scaled on read, rounded on write: the same bits at every stage, near the fp32 training."""
    module = mlp(6, 7, 5, 3)
    wanted = plain_training(module, by_torch(kind, module), regression(6, 8, 6, 3), clip=0.5)
    # bf16 keeps 8 bits: gradients are off by a few 2^-8 of their size. A sign of Lion's may turn.
    moved = furthest(wanted, weights(mlp(6, 7, 5, 3)))
    bound = 4.1 * 0.01 if kind == "lion" else moved / 50
    assert bound < moved
    first: dict[str, Tensor] = {}
    for stage in STAGES:
        whole = ranks(2)(built, stage, kind, "bf16")[0]["whole"]
        first = first or whole
        assert furthest(whole, first) == 0, f"stage {stage}"
        assert furthest(whole, wanted) <= bound, f"stage {stage}"


def foreign_switch(stage: int) -> str:
    saved_with = mlp(6, 8, 2)
    torch_adam = torch.optim.AdamW(saved_with.parameters(), lr=0.1, amsgrad=True)
    module = mlp(6, 8, 2)
    optimizer = AdamW(module.parameters(), lr=0.1)
    engine = Engine(module, optimizer, settings(stage))
    return " ".join(caught(engine.load_optimizer_state_dict, optimizer, torch_adam.state_dict()))


def test_a_switch_of_torchs_that_would_be_lost_is_refused(ranks):
    for said in ranks(2)(foreign_switch, 1):
        assert said.startswith("CheckpointError") and "amsgrad=True" in said
