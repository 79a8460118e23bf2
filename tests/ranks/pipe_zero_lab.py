"""Training through :class:`zeroexp.pipe_engine.PipeEngine`, and what it must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from formula import State, state_bytes
from pipeline_lab import SCHEDULES, gather_weights, tall_mlp
from small import rank, regression, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.pipe_engine import PipeEngine
from zeroexp.pipeline.cut import cut
from zeroexp.pipeline.runtime import layers_of
from zeroexp.pipeline.runtime.split import layer_sizes
from zeroexp.pipeline.schedules import make_schedule

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@dataclass
class Case:
    """One training: ``keys`` as :func:`small.settings` takes them."""

    schedule: str
    stage: int
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    stages: int = 2
    micro_batches: int = 4
    steps: int = 5
    keys: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    model: Callable[[torch.dtype], nn.Module] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss

    def build(self) -> nn.Module:
        if self.model is not None:
            return self.model(self.dtype)
        return tall_mlp(self.dtype, blocks=2 * self.stages)

    def config(self) -> dict[str, Any]:
        keys = {"zero_reduce": "each", **self.keys}
        return {
            **settings(self.stage, **keys),
            "pipeline": {
                "schedule": self.schedule,
                "stages": self.stages,
                "micro_batches": self.micro_batches,
                "virtual": SCHEDULES[self.schedule],
                "cut": "layers",
                **self.pipeline,
            },
        }

    def batches(self, data_ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Global batches: two samples per micro-batch and data rank."""
        accumulate = self.keys.get("accumulate", 1)
        samples = 2 * self.micro_batches * data_ranks * accumulate
        return [
            (x.to(self.dtype), y.to(self.dtype)) for x, y in regression(self.steps, samples, 6, 3)
        ]


@dataclass
class Found:
    """Of one rank: losses by step, the whole state on rank 0, bytes of state by kind."""

    losses: list[float]
    state: dict[str, Tensor]
    bytes: dict[str, int]
    norms: list[float | None]
    engine: dict[str, Any]


def train(case: Case) -> Found:
    model = case.build()
    engine = PipeEngine(
        model, OPTIMIZERS[case.optimizer](model.parameters()), case.config(), loss=case.loss
    )
    data_ranks = world() // case.stages
    losses, norms, held = [], [], {}
    for x, y in case.batches(data_ranks):
        total = 0.0
        accumulate = case.keys.get("accumulate", 1)
        mine = [t.chunk(data_ranks)[rank() % data_ranks] for t in (x, y)]
        for part_x, part_y in zip(*(t.chunk(accumulate) for t in mine), strict=True):
            total += engine.train_batch(part_x, part_y) / accumulate
        held = {kind: sum(tiers.values()) for kind, tiers in engine.ledger.state_bytes().items()}
        engine.step()
        losses.append(total)
        norms.append(engine.grad_norm)
    facts = {
        "steps": (engine.global_steps, engine.skipped_steps),
        "gathers": engine.ledger.comm_bytes().get("all_gather", 0),
    }
    state = engine.state_dict()
    engine.close()
    whole = {n: p.detach() for n, p in model.named_parameters()}
    if rank() == 0:
        assert all(torch.equal(whole[n], state[n].to(whole[n].dtype)) for n in whole)
    facts["whole"] = whole
    return Found(losses, state, held, norms, facts)


def train_all(cases: list[Case]) -> list[Found]:
    return [train(case) for case in cases]


def reference(case: Case, data_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process on the whole batches."""
    model = case.build()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for x, y in case.batches(data_ranks):
        loss = case.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if case.keys.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), case.keys["clip"])
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def bytes_of_places(case: Case, data_ranks: int) -> list[State]:
    """The state bytes of one rank of each place in the pipe, from shapes alone."""
    layers = layers_of(case.build())
    schedule = make_schedule(
        case.schedule, case.stages, case.micro_batches, SCHEDULES[case.schedule]
    )
    where = cut(layer_sizes(layers), schedule.num_stages, "layers")
    found = []
    for place in range(case.stages):
        chosen = [n for s in schedule.stages_of(place) for n in where.stage(s)]
        held = nn.ModuleDict({layers[n][0]: layers[n][1] for n in chosen})
        size = case.dtype.itemsize
        found.append(
            state_bytes(
                held,
                case.stage,
                data_ranks,
                param_size=size,
                grad_size=size,
                optim_size=2 * size if case.optimizer == "adamw" else 0,
                summed_apart=True,
            )
        )
    return found


__all__ = ["Case", "Found", "bytes_of_places", "gather_weights", "reference", "train", "train_all"]
