"""Stochastic gradient descent on flat CPU tensors, with momentum and a copy in the same
pass."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.ops.checks import TYPE_NAMES, check_step
from zeroexp.ops.native import native


def sgd_(
    p: Tensor,
    g: Tensor,
    buffer: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool = False,
    grad_scale: float = 1.0,
    copy_out: Tensor | None = None,
) -> None:
    """One step of gradient descent in place (Sutskever et al., ICML 2013; torch.optim.SGD's order).

    ``p``: fp32. ``buffer``: fp32, the momentum; None without one. ``g``: fp32, bf16 or fp16; it is
    multiplied by ``grad_scale`` in fp32, then ``weight_decay * p`` is added. ``first`` starts
    ``buffer`` as that gradient, without dampening; what it held is not looked at. ``copy_out``:
    fp32, bf16 or fp16, receives the new parameter, rounded to nearest even. All are dense
    contiguous CPU tensors with the same number of elements and memory of their own.

    Kernels of every instruction set give the same bits, for any number of threads, any size and any
    cut of a tensor into pieces: those of torch's foreach optimizer on a CPU with FMA. Autograd does
    not see the writes.

    Raises TypeError and ValueError that name the argument.
    """
    size = check_step("sgd_", p, g, {} if buffer is None else {"buffer": buffer}, copy_out)
    if buffer is None and (momentum != 0 or nesterov):
        raise ValueError(
            f"sgd_: buffer is None, but momentum is {momentum} and nesterov {nesterov}; pass the "
            "momentum buffer"
        )
    kernels = native().kernels
    if kernels is None:
        sgd_in_torch_(
            p.view(-1),
            g.view(-1).float() * grad_scale,
            None if buffer is None else buffer.view(-1),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            weight_decay=weight_decay,
            first=first,
        )
        if copy_out is not None:
            copy_out.view(-1).copy_(p.detach().view(-1))
        return
    kernels.sgd(
        param=p.data_ptr(),
        grad=g.data_ptr(),
        momentum_buffer=0 if buffer is None else buffer.data_ptr(),
        copy=0 if copy_out is None else copy_out.data_ptr(),
        size=size,
        grad_type=TYPE_NAMES[g.dtype],
        copy_type="" if copy_out is None else TYPE_NAMES[copy_out.dtype],
        grad_scale=grad_scale,
        weight_decay=weight_decay,
        momentum=momentum,
        one_minus_dampening=1 - dampening,
        neg_lr=-lr,
        first=first,
        nesterov=nesterov,
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def sgd_in_torch_(
    p: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
) -> None:
    """The same step in torch's operations, on any device: ``grad`` is scaled already and has the
    dtype of ``p`` and ``buffer``, and all have the shape of ``p``."""
    if weight_decay != 0:
        grad = grad.add(p, alpha=weight_decay)
    if buffer is not None:
        if first:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
        grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
    p.add_(grad, alpha=-lr)
