"""torch DistributedDataParallel with fused AdamW, default buckets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peer import State, fused_adamw, torch_state


class Wrapped:
    """A DDP module and an optimizer over all of its parameters or over this rank's."""

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(inputs, targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()

    def state(self) -> State:
        return torch_state(self.model, self.optimizer)


def start(model: nn.Module, options: Mapping[str, object]) -> Wrapped:
    return Wrapped(DistributedDataParallel(model), fused_adamw(model.parameters()))
