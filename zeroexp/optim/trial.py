"""What an optimizer does to a few numbers, found by letting a twin of it do it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


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
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {
        **optimizer.__dict__,
        "state": defaultdict(dict),
        "param_groups": [{**optimizer.param_groups[group], "params": params}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    for name in ("step", "zero_grad"):  # methods an engine or a scheduler put on the instance
        twin.__dict__.pop(name, None)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        twin.step()
    return [p.detach() for p in params], [dict(twin.state[p]) for p in params]
