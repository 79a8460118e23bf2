"""Lion over flat shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroexp import ops
from zeroexp.comm.pool import flat_zeros
from zeroexp.ops.lion import lion_in_torch_
from zeroexp.optim.one_pass import OnePass


class Lion(OnePass):
    """The sign of an interpolated momentum, with decoupled decay (Chen et al., arXiv:2302.06675,
    algorithm 2). State per element: ``exp_avg`` in the dtype of the parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _compiled(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], copy_out: Tensor | None
    ) -> None:
        ops.lion_(
            p,
            grad,
            self._momentum(p),
            **_hyperparameters(group),
            grad_scale=self.grad_scale,
            copy_out=copy_out,
        )

    def _in_torch(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        lion_in_torch_(p, grad, self._momentum(p), **_hyperparameters(group))

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["exp_avg"] = flat_zeros(p.numel(), p.dtype, p.device).view(p.shape)
        momentum: Tensor = state["exp_avg"]
        return momentum


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
    }
