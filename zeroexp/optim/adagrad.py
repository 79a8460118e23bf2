"""Adagrad over flat shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.comm.pool import flat_zeros
from zeroexp.ops.adagrad import adagrad_in_torch_
from zeroexp.optim.one_pass import OnePass


class Adagrad(OnePass):
    """Duchi et al., JMLR 12, 2011, with the operations of ``torch.optim.Adagrad`` in their order.

    State per element: ``sum`` in the dtype of the parameter, from ``initial_accumulator_value`` on;
    per tensor: ``step``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
            },
        )

    def _compiled(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], copy_out: Tensor | None
    ) -> None:
        total, step = self._advanced(p, group)
        ops.adagrad_(
            p,
            grad,
            total,
            **_hyperparameters(group),
            step=step,
            grad_scale=self.grad_scale,
            copy_out=copy_out,
        )

    def _in_torch(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        total, step = self._advanced(p, group)
        adagrad_in_torch_(p, grad, total, **_hyperparameters(group), step=step)

    def _advanced(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, int]:
        """The sum of squares of ``p``, and the number of the step that begins."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sum"] = flat_zeros(p.numel(), p.dtype, p.device).view(p.shape)
            if group["initial_accumulator_value"]:
                state["sum"].fill_(group["initial_accumulator_value"])
        state["step"] += 1
        return state["sum"], int(state["step"])


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "lr_decay": group["lr_decay"],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
