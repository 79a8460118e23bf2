"""AdamW and Adam on flat CPU tensors, with an optional copy in the same pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroexp.ops.checks import TYPE_NAMES, check_step
from zeroexp.ops.native import native


@dataclass(frozen=True)
class AdamScalars:
    """The scalars of one step, in double as torch.optim has them; rounded to fp32 where used."""

    decay: float
    weight_decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    eps: float
    neg_step_size: float

    @staticmethod
    def of_step(
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> AdamScalars:
        return AdamScalars(
            decay=1 - lr * weight_decay if decoupled else 1.0,
            weight_decay=0.0 if decoupled else weight_decay,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            bias2_sqrt=math.sqrt(1 - beta2**step),
            eps=eps,
            neg_step_size=-lr / (1 - beta1**step),
        )


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    copy_out: Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, arXiv:1711.05101; torch.optim.AdamW's order).

    ``p``, ``m``, ``v``: fp32, the parameter and its first and second moment. ``g``: fp32, bf16 or
    fp16; it is multiplied by ``grad_scale`` in fp32 first. ``copy_out``: fp32, bf16 or fp16,
    receives the new parameter, rounded to nearest even. All are dense contiguous CPU tensors with
    the same number of elements and memory of their own. ``step`` counts from 1. ``decoupled=False``
    adds ``weight_decay * p`` to the gradient instead (torch.optim.Adam).

    Kernels of every instruction set give the same bits, for any number of threads, any size and any
    cut of a tensor into pieces: the moments are those of torch's foreach optimizer on a CPU with
    FMA, the parameter is within the rounding of torch's square root, which is not exact (torch's
    fused kernel: within one ulp of max(|p|, |update|)). Autograd does not see the writes.

    Raises TypeError and ValueError that name the argument.
    """
    size = check_step("adamw_", p, g, {"m": m, "v": v}, copy_out)
    if step < 1:
        raise ValueError(f"adamw_: step is {step}; steps count from 1")
    scalars = AdamScalars.of_step(step, lr, beta1, beta2, eps, weight_decay, decoupled)
    kernels = native().kernels
    if kernels is None:
        _reference(p, g, m, v, scalars, grad_scale, copy_out)
        return
    kernels.adam(
        param=p.data_ptr(),
        grad=g.data_ptr(),
        exp_avg=m.data_ptr(),
        exp_avg_sq=v.data_ptr(),
        copy=0 if copy_out is None else copy_out.data_ptr(),
        size=size,
        grad_type=TYPE_NAMES[g.dtype],
        copy_type="" if copy_out is None else TYPE_NAMES[copy_out.dtype],
        l2=scalars.weight_decay != 0,
        grad_scale=grad_scale,
        decay=scalars.decay,
        weight_decay=scalars.weight_decay,
        one_minus_beta1=scalars.one_minus_beta1,
        beta2=scalars.beta2,
        one_minus_beta2=scalars.one_minus_beta2,
        bias2_sqrt=scalars.bias2_sqrt,
        eps=scalars.eps,
        neg_step_size=scalars.neg_step_size,
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def _reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    s: AdamScalars,
    grad_scale: float,
    copy_out: Tensor | None,
) -> None:
    """The same step in torch's operations; element-wise, so independent of position as well."""
    p, m, v = p.view(-1), m.view(-1), v.view(-1)
    grad = g.view(-1).float() * grad_scale
    if s.weight_decay != 0:
        grad = grad.add(p, alpha=s.weight_decay)
    p.mul_(s.decay)
    m.lerp_(grad, s.one_minus_beta1)
    v.mul_(s.beta2).addcmul_(grad, grad, value=s.one_minus_beta2)
    denominator = v.sqrt().div_(s.bias2_sqrt).add_(s.eps)
    p.addcdiv_(m, denominator, value=s.neg_step_size)
    if copy_out is not None:
        copy_out.view(-1).copy_(p)
