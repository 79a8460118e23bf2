"""torch FSDP2 (``fully_shard``) with fused AdamW; every block is a unit, the rest is the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peer import State, fused_adamw, torch_state


class Fsdp:
    def __init__(self, model: nn.Module, *, reshard: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in cast(Iterable[nn.Module], model.blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        self.model = model
        self.optimizer = fused_adamw(model.parameters())

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(inputs, targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()

    def state(self) -> State:
        return torch_state(self.model, self.optimizer)


def start(model: nn.Module, options: Mapping[str, object]) -> Fsdp:
    return Fsdp(model, reshard=bool(options["reshard"]))
