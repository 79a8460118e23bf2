"""Adagrad on flat CPU tensors, with an optional copy in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.ops.checks import TYPE_NAMES, check_step
from zeroexp.ops.native import native


def adagrad_(
    p: Tensor,
    g: Tensor,
    total: Tensor,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    copy_out: Tensor | None = None,
) -> None:
    """One Adagrad step in place (Duchi et al., JMLR 12, 2011; torch.optim.Adagrad's order).

    ``p``, ``total``: fp32, the parameter and the sum of its squared gradients. ``g``: fp32, bf16 or
    fp16; it is multiplied by ``grad_scale`` in fp32, then ``weight_decay * p`` is added. ``step``
    counts from 1; the learning rate is ``lr / (1 + (step - 1) * lr_decay)``. ``copy_out``: fp32,
    bf16 or fp16, receives the new parameter, rounded to nearest even. All are dense contiguous CPU
    tensors with the same number of elements and memory of their own.

    Kernels of every instruction set give the same bits, for any number of threads, any size and any
    cut of a tensor into pieces: the sum is that of torch's foreach optimizer on a CPU with FMA, the
    parameter is within the rounding of torch's square root, which is not exact. Autograd does not
    see the writes.

    Raises TypeError and ValueError that name the argument.
    """
    size = check_step("adagrad_", p, g, {"total": total}, copy_out)
    if step < 1:
        raise ValueError(f"adagrad_: step is {step}; steps count from 1")
    kernels = native().kernels
    if kernels is None:
        adagrad_in_torch_(
            p.view(-1),
            g.view(-1).float() * grad_scale,
            total.view(-1),
            step=step,
            lr=lr,
            lr_decay=lr_decay,
            eps=eps,
            weight_decay=weight_decay,
        )
        if copy_out is not None:
            copy_out.view(-1).copy_(p.detach().view(-1))
        return
    kernels.adagrad(
        param=p.data_ptr(),
        grad=g.data_ptr(),
        sum=total.data_ptr(),
        copy=0 if copy_out is None else copy_out.data_ptr(),
        size=size,
        grad_type=TYPE_NAMES[g.dtype],
        copy_type="" if copy_out is None else TYPE_NAMES[copy_out.dtype],
        grad_scale=grad_scale,
        weight_decay=weight_decay,
        eps=eps,
        neg_step_size=-lr / (1 + (step - 1) * lr_decay),
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def adagrad_in_torch_(
    p: Tensor,
    grad: Tensor,
    total: Tensor,
    *,
    step: int,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The same step in torch's operations, on any device: ``grad`` is scaled already, and all have
    the shape and dtype of ``p``."""
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    total.addcmul_(grad, grad)
    p.addcdiv_(grad, total.sqrt().add_(eps), value=-lr / (1 + (step - 1) * lr_decay))
