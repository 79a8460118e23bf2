"""Which optimizer group each parameter is stepped in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from zeroexp.errors import ModelError, OptimizerError


def group_numbers(
    module: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[list[int], dict[int, int]]:
    """First group number of each optimizer, and ``id(parameter)`` to group number over all
    optimizers.

    Raises :class:`OptimizerError` for parameters of another model and for parameters in two groups.
    """
    names = {id(p): n for n, p in module.named_parameters()}
    first, groups, number = [], {}, 0
    for optimizer in optimizers:
        first.append(number)
        foreign = [
            tuple(p.shape)
            for g in optimizer.param_groups
            for p in g["params"]
            if id(p) not in names
        ]
        if foreign:
            raise OptimizerError(
                f"the optimizer holds {len(foreign)} parameter(s) that are not in the module, the "
                "first of shape "
                f"{foreign[0]}. Build the optimizer from the parameters of the module you pass to "
                "zeroexp."
            )
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in groups:
                    raise OptimizerError(
                        f"parameter {names[id(param)]} is in two optimizer groups; keep it in one"
                    )
                groups[id(param)] = number
            number += 1
    if optimizers and not any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            "the model has no trainable parameter: every requires_grad is False. "
            "Unfreeze at least one."
        )
    return first, groups
