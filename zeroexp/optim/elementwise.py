"""Does an optimizer treat every element on its own? Only then may a tensor be cut anywhere.

Known optimizers are known by identity. Any other is *tried*: it steps a small matrix whole, flat
and in two halves; when the three agree, it is element-wise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from zeroexp.optim.trial import trial

_KNOWN = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
_ROWS, _COLUMNS, _STEPS = 8, 32, 3


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether stepping slices of a parameter gives the slices of the stepped parameter."""
    if type(optimizer) in _KNOWN:
        return True
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, _COLUMNS)
    start = torch.randn(shape, generator=generator)
    grads = [torch.randn(shape, generator=generator) for _ in range(_STEPS)]
    try:
        whole = _stepped(optimizer, [start], [[g] for g in grads])
        flat = _stepped(optimizer, [start.flatten()], [[g.flatten()] for g in grads])
        half = start.numel() // 2
        halves = _stepped(
            optimizer,
            list(start.flatten().split(half)),
            [list(g.flatten().split(half)) for g in grads],
        )
    except Exception:
        # An optimizer that cannot step a flat tensor at all (it wants matrices, a closure, sparse
        # gradients) is not
        # element-wise; what it raised is of no use to the user, who never asked for the trial.
        return False
    return torch.allclose(whole, flat, rtol=1e-6, atol=1e-8) and torch.allclose(
        whole, halves, rtol=1e-6, atol=1e-8
    )


def _stepped(
    optimizer: Optimizer, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> Tensor:
    params, _ = trial(optimizer, start, grads)
    return torch.cat([p.flatten() for p in params])
