"""zeroexp's engine, stages 0-3, with its own AdamW and its defaults; float32 and no clipping, as
every mode here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peer import State, fused_adamw
from zeroexp.config import Config
from zeroexp.engine import Engine


class Zeroexp:
    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        config = Config.from_mapping(
            {
                "zero": dict(options),
                "precision": {"compute": "fp32"},
                "trainer": {
                    "devices": dist.get_world_size(),
                    "accumulate_grad_batches": 1,
                    "gradient_clip_val": None,
                },
            }
        )
        self.engine = Engine(model, fused_adamw(model.parameters()), config)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.engine.zero_grad()
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()

    def state(self) -> State:
        return State()


def start(model: nn.Module, options: Mapping[str, Any]) -> Zeroexp:
    return Zeroexp(model, options)
