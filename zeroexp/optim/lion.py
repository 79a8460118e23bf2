"""Lion (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled decay. State per element: ``exp_avg``.

    Element-wise, so it can be stepped over any cut of a parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay = float(group["lr"]), group["weight_decay"]
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                m = state["exp_avg"]
                grad = p.grad.to(p.dtype)
                update = m.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
                p.mul_(1 - lr * decay).add_(update, alpha=-lr)
                m.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss
