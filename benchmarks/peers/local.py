"""Floor: forward and backward of every rank at once, without communication or optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.peer import State, torch_state


class Local:
    """No other rank, no optimizer: what no data-parallel system can beat."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss: Tensor = self.model(inputs, targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self) -> None:
        pass

    def state(self) -> State:
        return torch_state(self.model, None)


def start(model: nn.Module, options: Mapping[str, object]) -> Local:
    return Local(model)
