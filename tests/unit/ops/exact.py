"""AdamW from its formula in fp64 and the spacing of fp32 numbers: independent of the ops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    step: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


def fp64_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Hyper
) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv:1711.05101, algorithm 2, in fp64: new parameter and moments from equal state."""
    p, g, m, v = p.double(), g.double(), m.double(), v.double()
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    m_hat = m / (1 - h.beta1**h.step)
    v_hat = v / (1 - h.beta2**h.step)
    p = p - h.lr * h.weight_decay * p - h.lr * m_hat / (v_hat.sqrt() + h.eps)
    return p, m, v


def ulp(x: Tensor) -> Tensor:
    """The spacing of fp32 numbers at |x|, in fp64."""
    x = x.abs().float().clamp_min(torch.finfo(torch.float32).tiny)
    return (torch.nextafter(x, torch.full_like(x, math.inf)).double() - x.double()).clamp_min(
        2.0**-149
    )
