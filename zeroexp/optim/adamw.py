"""AdamW and Adam over flat shards: the compiled kernel on the CPU, torch's fused kernel on
accelerators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.comm.pool import flat_zeros
from zeroexp.optim.one_pass import OnePass


class AdamW(OnePass):
    """Loshchilov and Hutter, arXiv:1711.05101, with the operations of ``torch.optim.AdamW`` in
    their order.

    ``decoupled=False`` adds the decay to the gradient instead (Kingma and Ba, arXiv:1412.6980, with
    L2 penalty). State per element: ``exp_avg`` and ``exp_avg_sq`` in the dtype of the parameter;
    per tensor: ``step``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled": decoupled,
            },
        )

    def _compiled(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], copy_out: Tensor | None
    ) -> None:
        state, step = self._advanced(p)
        beta1, beta2 = group["betas"]
        ops.adamw_(
            p,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=step,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=self.grad_scale,
            copy_out=copy_out,
            decoupled=group["decoupled"],
        )

    def _in_torch(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, step = self._advanced(p)
        _torch_step(p, grad, state, group, step)

    def _advanced(self, p: Tensor) -> tuple[dict[str, Any], int]:
        """The moments of ``p``, and the number of the step that begins."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = flat_zeros(p.numel(), p.dtype, p.device).view(p.shape)
            state["exp_avg_sq"] = flat_zeros(p.numel(), p.dtype, p.device).view(p.shape)
        state["step"] += 1
        return state, int(state["step"])


def _torch_step(
    p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], step: int
) -> None:
    """The same update by torch: its fused kernel on CUDA, plain operations elsewhere."""
    beta1, beta2 = group["betas"]
    lr, eps, decay = float(group["lr"]), group["eps"], group["weight_decay"]
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if p.device.type == "cuda":
        kernel = torch._fused_adamw_ if group["decoupled"] else torch._fused_adam_
        kernel(
            [p],
            [grad],
            [m],
            [v],
            [],
            [torch.tensor(float(step), device=p.device)],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        return
    if decay and not group["decoupled"]:
        grad = grad.add(p, alpha=decay)
    elif decay:
        p.mul_(1 - lr * decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
