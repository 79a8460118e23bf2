"""Expert-parallel training by hand: groups, a plain SGD loop, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroexp.comm import Group
from zeroexp.comm.group import SoloGroup
from zeroexp.comm.p2p import P2PGroup
from zeroexp.ledger import Ledger
from zeroexp.moe import MLP, MoE, auxiliary_loss, expert_parameters, name_layers, update_biases

WIDTH, TOKENS, LR = 8, 12, 0.1


def expert_group(size: int, *, timeout: float = 30.0, space: int = 0) -> Group:
    """This rank's block of ``size`` neighbouring ranks; made by all ranks together."""
    rank = dist.get_rank()
    first = rank // size * size
    if size == 1:
        return SoloGroup(rank, Ledger())
    channel = dist.new_group(timeout=timedelta(seconds=timeout))
    ranks = range(first, first + size)
    return P2PGroup(channel, ranks, rank, Ledger(), timeout, space=space)


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


EXPERTS: dict[str, Any] = {"mlp": MLP(6), "modules": module}


def build(keys: dict[str, Any], group: Group | None) -> nn.Module:
    """Two MoE layers between dense ones."""
    torch.manual_seed(0)
    given = {"expert": "mlp", "num_experts": 4, **keys}
    expert = EXPERTS[given.pop("expert")]
    shared = [module() for _ in range(2)] if given.pop("shared", False) else [None, None]
    layers = [MoE(WIDTH, expert, group=group, shared=s, **given) for s in shared]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layers[0], nn.Linear(WIDTH, WIDTH), layers[1])
    with torch.no_grad():
        for layer in layers:
            layer.gate.weight.mul_(4)
    name_layers(model)
    return model


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean() + auxiliary_loss(model)


def sgd(parameters: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, grad in parameters:
            parameter.sub_(grad, alpha=LR)


def averaged(model: nn.Module, size: int) -> list[tuple[nn.Parameter, Tensor]]:
    """Gradients summed over the ranks that hold the parameter, over the size of the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    experts = {found.parameter for found in expert_parameters(model)}
    parameters = list(model.parameters())
    mine = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    everyones = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyones, mine)
    table = torch.stack(everyones).split([p.numel() for p in parameters], dim=1)
    out = []
    for parameter, grads in zip(parameters, table, strict=True):
        holders = range(rank % size, world, size) if parameter in experts else range(world)
        out.append((parameter, (grads[list(holders)].sum(0) / world).view_as(parameter)))
    return out


def by_global_id(model: nn.Module) -> dict[str, Tensor]:
    """All parameters; stacked experts one by one, under their global ids."""
    experts = {found.name: found for found in expert_parameters(model)}
    out = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if name in experts and experts[name].stacked:
            for place, expert in enumerate(experts[name].experts):
                out[f"{name}[{expert}]"] = value[place]
        else:
            out[name] = value
    return out


def train(
    keys: dict[str, Any], sizes: Sequence[int], dtype: torch.dtype, steps: int
) -> dict[int, dict[str, Tensor]]:
    """Weights of this rank after ``steps``, by the size of the expert-parallel group."""
    found = {}
    everyone = expert_group(dist.get_world_size(), space=7)
    for space, size in enumerate(sizes):
        model = build(keys, expert_group(size, space=space)).to(dtype)
        for step in range(steps):
            model.zero_grad()
            loss_of(model, batch(step, dist.get_rank(), dtype)).backward()
            sgd(averaged(model, size))
            update_biases(model, everyone)
        found[size] = by_global_id(model)
    return found


def train_alone(
    keys: dict[str, Any], world: int, dtype: torch.dtype, steps: int, *, together: bool
) -> dict[str, Tensor]:
    """The same in one process that has all experts and sees every rank's batch: all of them
    ``together`` as one batch, or one after the other with the mean of the gradients."""
    model = build(keys, None).to(dtype)
    for step in range(steps):
        batches = [batch(step, rank, dtype) for rank in range(world)]
        model.zero_grad()
        if together:
            loss_of(model, torch.cat(batches)).backward()
        else:
            for x in batches:
                (loss_of(model, x) / world).backward()
        sgd([(p, p.grad) for p in model.parameters() if p.grad is not None])
        update_biases(model)
    return by_global_id(model)
