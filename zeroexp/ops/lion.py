"""Lion on flat CPU tensors, with an optional copy in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.ops.checks import TYPE_NAMES, check_step
from zeroexp.ops.native import native


def lion_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    copy_out: Tensor | None = None,
) -> None:
    """One Lion step in place (Chen et al., arXiv:2302.06675, algorithm 2).

    ``p``, ``m``: fp32, the parameter and its momentum. ``g``: fp32, bf16 or fp16; it is multiplied
    by ``grad_scale`` in fp32 first. ``copy_out``: fp32, bf16 or fp16, receives the new parameter,
    rounded to nearest even. All are dense contiguous CPU tensors with the same number of elements
    and memory of their own.

    Where the update has no sign because it is not a number, the parameter becomes NaN
    (``torch.sign`` gives 0 there, which would freeze it without a word).

    Kernels of every instruction set give the same bits, for any number of threads, any size and any
    cut of a tensor into pieces. Autograd does not see the writes.

    Raises TypeError and ValueError that name the argument.
    """
    size = check_step("lion_", p, g, {"m": m}, copy_out)
    kernels = native().kernels
    if kernels is None:
        lion_in_torch_(
            p.view(-1),
            g.view(-1).float() * grad_scale,
            m.view(-1),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
        )
        if copy_out is not None:
            copy_out.view(-1).copy_(p.detach().view(-1))
        return
    kernels.lion(
        param=p.data_ptr(),
        grad=g.data_ptr(),
        exp_avg=m.data_ptr(),
        copy=0 if copy_out is None else copy_out.data_ptr(),
        size=size,
        grad_type=TYPE_NAMES[g.dtype],
        copy_type="" if copy_out is None else TYPE_NAMES[copy_out.dtype],
        grad_scale=grad_scale,
        decay=1 - lr * weight_decay,
        beta1=beta1,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        neg_lr=-lr,
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def lion_in_torch_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """The same step in torch's operations, on any device: ``grad`` is scaled already, and all have
    the shape and dtype of ``p``."""
    update = m.mul(beta1).add_(grad, alpha=1 - beta1)
    direction = torch.where(update.isnan(), update, update.sign())
    p.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    m.mul_(beta2).add_(grad, alpha=1 - beta2)
