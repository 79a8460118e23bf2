"""What an optimizer does to a few numbers, found by letting a twin of it do it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.optim.twin import bare_twin, plain_step


def trial(
    optimizer: Optimizer,
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    group: int = 0,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Step copies of ``start``, once per element of ``grads``, with a twin of ``optimizer`` that
    has the hyperparameters of its parameter group ``group``.

    Returns the stepped copies and their state. What the optimizer raises comes through.
    """
    params = [t.clone() for t in start]
    groups = [{**optimizer.param_groups[group], "params": params}]
    twin = bare_twin(optimizer, state=defaultdict(dict), param_groups=groups)
    step = plain_step(optimizer)
    for values in grads:
        for param, grad in zip(params, values, strict=True):
            param.grad = grad.clone()
        step(twin)
    return [p.detach() for p in params], [dict(twin.state[p]) for p in params]
