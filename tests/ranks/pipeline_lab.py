"""Pipelines on the ranks of the pool, and the same training in one process by plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.ledger import Ledger
from zeroexp.pipeline.action import Action, Kind
from zeroexp.pipeline.cut import cut
from zeroexp.pipeline.runtime import Channel, Executor, Ties, layers_of, split, split_batch
from zeroexp.pipeline.runtime.run import Result
from zeroexp.pipeline.runtime.split import layer_sizes
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules.registry import make_schedule

Loss = Callable[[Any, Tensor], Tensor]

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "breadth_first": 2,
    "zb_h1": 1,
    "zb_v": 2,
    "dualpipe_v": 2,
}
"""Every schedule and its stages per rank."""


class Pipe:
    """A model in a pipeline over all ranks of the pool."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        loss: Loss = F.mse_loss,
        *,
        by: str | Sequence[int] = "layers",
        recompute: bool = False,
        timeout: float = 30.0,
        owner: Any = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.ledger = Ledger()
        members = range(dist.get_world_size()) if members is None else members
        self.channel = Channel.open(members, self.ledger, timeout)
        where = cut(layer_sizes(layers_of(model)), schedule.num_stages, by)
        held = schedule.stages_of(self.channel.index)
        self.split = split(model, where, held, recompute=recompute)
        self.ties = Ties(self.channel, self.split.tied)
        self.executor = Executor(schedule, self.split.stages, self.channel, loss=loss, owner=owner)
        self.micro_batches = schedule.micro_batches

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.split.names()

    def run(self, x: Any, y: Any, **keys: Any) -> Result:
        """One global batch, forward and backward."""
        inputs, targets = (split_batch(value, self.micro_batches) for value in (x, y))
        result = self.executor.run(inputs, targets, **keys)
        self.ties.sum_grads()
        return result

    def train(self, batches: Sequence[tuple[Any, Any]], lr: float) -> list[float]:
        """SGD over the batches; the losses."""
        optimizer = torch.optim.SGD(list(self.parameters.values()), lr=lr)
        losses = []
        for x, y in batches:
            result = self.run(x, y)
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss is not None
            losses.append(result.loss)
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_losses(
    model: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss, lr: float
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in this process: losses of the whole batch, weights at the end."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for x, y in batches:
        value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, by_name(model)


def gather_weights(found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' weights as one model's; copies of a tied weight must have the same bits."""
    whole: dict[str, Tensor] = {}
    for part in found:
        for name, value in part.items():
            assert name not in whole or torch.equal(whole[name], value), name
            whole[name] = value
    return whole


def tall_mlp(dtype: torch.dtype = torch.float64, blocks: int = 4) -> nn.Sequential:
    """Layers with and without parameters, in-place ones at the cuts, a width that changes."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    for _ in range(blocks - 1):
        layers += [nn.ELU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 8)]
    layers += [nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def regression_batches(
    steps: int, samples: int, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(6)
    return [
        (
            torch.randn(samples, 6, generator=source, dtype=torch.float64).to(dtype),
            torch.randn(samples, 3, generator=source, dtype=torch.float64).to(dtype),
        )
        for _ in range(steps)
    ]


def scheduled(name: str, ranks: int, micro_batches: int) -> Schedule:
    return make_schedule(name, ranks, micro_batches, SCHEDULES[name])


def random_schedule(seed: int, ranks: int) -> Schedule:
    """Stages and micro-batches anywhere, backwards split or not, in any order that respects what
    needs what."""
    draw = random.Random(seed)
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randrange(3)))]
    draw.shuffle(rank_of)
    num_stages, micro_batches = len(rank_of), draw.randrange(1, 5)
    needs: dict[Action, list[Action]] = {}
    for m in range(micro_batches):
        behind: Action | None = None
        for s in range(num_stages):
            action = Action(Kind.FORWARD, s, m)
            needs[action] = [behind] if behind else []
            behind = action
        for s in reversed(range(num_stages)):
            split_it = draw.random() < 0.5
            action = Action(Kind.BACKWARD_INPUT if split_it else Kind.BACKWARD, s, m)
            needs[action] = [Action(Kind.FORWARD, s, m), *([behind] if behind else [])]
            behind = action
            if split_it:
                needs[Action(Kind.BACKWARD_WEIGHT, s, m)] = [action]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = [a for a, wanted in needs.items() if a not in done and done.issuperset(wanted)]
        action = draw.choice(ready)
        done.add(action)
        lists[rank_of[action.stage]].append(action)
    return Schedule(f"random {seed}", tuple(rank_of), micro_batches, tuple(map(tuple, lists)))
