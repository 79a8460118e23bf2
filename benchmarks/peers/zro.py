"""torch DDP with ZeroRedundancyOptimizer over fused AdamW: the optimizer state is sharded, whole
parameters at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peer import State, tensors_in, torch_state
from benchmarks.peers.ddp import Wrapped
from benchmarks.work import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY


class Zro(Wrapped):
    """The wrapper's own ``state`` is empty until it is consolidated: the state lies in the inner
    optimizer."""

    optimizer: ZeroRedundancyOptimizer

    def state(self) -> State:
        found = torch_state(self.model, None)
        found.optim = list(tensors_in(dict(self.optimizer.optim.state)))
        return found


def start(model: nn.Module, options: Mapping[str, object]) -> Zro:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    return Zro(DistributedDataParallel(model), optimizer)
