"""zeroexp's engine, stages 0-3, with its own AdamW; float32 and no clipping, as every mode here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peer import State, tensors_in
from benchmarks.work import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.optim import build


class Zeroexp:
    """``options`` are keys of the ``zero`` section; everything else that matters here is a
    default."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        config = Config.from_mapping(
            {
                "zero": dict(options),
                "precision": {"compute": "fp32"},
                "optim": {
                    "kind": "adamw",
                    "lr": LEARNING_RATE,
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": WEIGHT_DECAY,
                    "decay_norm_and_bias": True,
                },
                "trainer": {"devices": dist.get_world_size(), "gradient_clip_val": None},
            }
        )
        optimizer = build(config.optim, model.named_parameters())
        self.engine = Engine(model, optimizer, config)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()

    def state(self) -> State:
        """Found in the segments and the optimizer's state, not asked of the ledger; only the
        padding is the ledger's word."""
        segments = self.engine.model.segments
        masters = [s.master for s in segments if s.has_master_copy]
        return State(
            params=[s.shard if s.sharded else s.full for s in segments],
            grads=[s.grads.owned for s in segments if s.spec.trainable],
            optim=masters
            + [t for s in self.engine.steppers for t in tensors_in(dict(s.face.state))],
            padding_bytes=self.engine.ledger.padding_bytes(),
        )


def start(model: nn.Module, options: Mapping[str, Any]) -> Zeroexp:
    return Zeroexp(model, options)
