"""Stochastic gradient descent over flat shards, plain or with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroexp import ops
from zeroexp.comm.pool import flat_zeros
from zeroexp.errors import OptimizerError
from zeroexp.ops.sgd import sgd_in_torch_
from zeroexp.optim.one_pass import OnePass


class SGD(OnePass):
    """Sutskever et al., ICML 2013, with the operations of ``torch.optim.SGD`` in their order.

    State per element, where a group has momentum: ``momentum_buffer`` in the dtype of the
    parameter. It starts as the first gradient, without dampening. Raises :class:`OptimizerError`
    for Nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptimizerError(
                f"SGD: nesterov=True with momentum={momentum} and dampening={dampening}; it needs "
                "momentum above 0 and no dampening"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )

    def _compiled(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], copy_out: Tensor | None
    ) -> None:
        buffer, first = self._buffer(p, group)
        ops.sgd_(
            p,
            grad,
            buffer,
            **_hyperparameters(group),
            first=first,
            grad_scale=self.grad_scale,
            copy_out=copy_out,
        )

    def _in_torch(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        buffer, first = self._buffer(p, group)
        sgd_in_torch_(p, grad, buffer, **_hyperparameters(group), first=first)

    def _buffer(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor | None, bool]:
        """The momentum of ``p``, and whether this is its first step."""
        if group["momentum"] == 0:
            return None, False
        state = self.state[p]
        # torch keeps None for a parameter that was never stepped with momentum.
        first = state.get("momentum_buffer") is None
        if first:
            state["momentum_buffer"] = flat_zeros(p.numel(), p.dtype, p.device).view(p.shape)
        buffer: Tensor = state["momentum_buffer"]
        return buffer, first


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "momentum": group["momentum"],
        "dampening": group["dampening"],
        "nesterov": group["nesterov"] and group["momentum"] != 0,
        "weight_decay": group["weight_decay"],
    }
