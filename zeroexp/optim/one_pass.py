"""What optimizers share that step a flat shard in one pass over memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OnePass(Optimizer):
    """Steps fp32 parameters on the CPU by one compiled kernel, others by torch.

    Gradients may be fp32, bf16 or fp16. Two attributes let an engine save passes over memory:
    ``grad_scale`` multiplies gradients as they are read, and ``copy_out`` maps a stepped tensor to
    another (fp32, bf16 or fp16) that receives the new values in the same pass.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.grad_scale = 1.0
        self.copy_out: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.device.type == "cpu" and p.dtype == torch.float32:
                    self._compiled(p, p.grad, group, self.copy_out.get(p))
                    continue
                grad = p.grad.to(p.dtype)  # before it is scaled: this may be the wider one
                if self.grad_scale != 1.0:
                    grad = grad * self.grad_scale
                self._in_torch(p, grad, group)
                if p in self.copy_out:
                    self.copy_out[p].copy_(p)
        return loss

    @abstractmethod
    def _compiled(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], copy_out: Tensor | None
    ) -> None:
        """Step ``p`` by the kernel, which scales ``grad`` and writes ``copy_out``."""

    @abstractmethod
    def _in_torch(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Step ``p`` by torch's operations; ``grad`` is scaled and has its dtype."""
