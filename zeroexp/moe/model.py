"""What a training loop asks of a model that has MoE layers, wherever they are in it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from zeroexp.comm import Group
from zeroexp.moe.experts import ExpertParameter
from zeroexp.moe.layer import MoE
from zeroexp.moe.section import Layers
from zeroexp.moe.statistics import Numbers, numbers


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers by their path in ``model``; a shared one once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def name_layers(model: nn.Module) -> None:
    """Tell every layer its path, for messages, and a number, so that what two layers send cannot be
    taken for each other."""
    for number, (path, layer) in enumerate(moe_layers(model).items()):
        layer.path = path
        layer.tag = number


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The weighted losses of all gates, to be added to the loss: a scalar, 0 where there are none.

    They are those of the forward passes in training since the last call, so with several
    micro-batches call it after each. In a pipeline the loss function on the last stage gets those
    of all stages.
    """
    taken = Layers(list(moe_layers(model).values())).take_losses()
    return torch.zeros(()) if taken is None else taken.sum()


def expert_parameters(model: nn.Module) -> Iterator[ExpertParameter]:
    """Every expert parameter of this rank, by its name in ``model``."""
    for path, layer in moe_layers(model).items():
        for found in layer.expert_parameters():
            yield replace(found, name=f"{path}.{found.name}" if path else found.name)


def experts_left_out(model: nn.Module, stepped: Container[int]) -> list[str]:
    """Names of expert parameters that want gradients and that nothing steps; ``stepped`` has the
    ``id`` of those that an optimizer holds."""
    return [
        found.name
        for found in expert_parameters(model)
        if found.parameter.requires_grad and id(found.parameter) not in stepped
    ]


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters that one token uses, and all there are, experts of other ranks included."""
    layers = moe_layers(model)
    experts = {found.parameter for found in expert_parameters(model)}
    rest = sum(p.numel() for p in model.parameters() if p not in experts)
    active = total = rest
    for layer in layers.values():
        here = sum(found.parameter.numel() for found in layer.expert_parameters())
        each = Fraction(here, len(layer.experts.ids))
        total += int(each * layer.num_experts)
        active += int(each * layer.gate.top_k)
    return active, total


def read_statistics(model: nn.Module, *groups: Group, reset: bool = True) -> dict[str, Numbers]:
    """What every layer did since the last reset, by path.

    ``groups``: their ranks call this together and get what they did together (one exchange each):
    the data-parallel ranks, and in a pipeline those of the pipe.
    """
    layers = moe_layers(model)
    if not layers:
        return {}
    sums = torch.cat([layer.statistics.sums() for layer in layers.values()])
    for group in groups:
        if group.size > 1:
            device = next(model.parameters()).device
            sums = group.exchange(sums.to(device), "statistics of the experts").sum(0).cpu()
    if reset:
        for layer in layers.values():
            layer.statistics.reset()
    widths = [layer.statistics.width for layer in layers.values()]
    return {path: numbers(part) for path, part in zip(layers, sums.split(widths), strict=True)}
