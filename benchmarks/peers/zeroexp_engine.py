"""zeroexp's engine, stages 0-3 and every tier, with its own AdamW in float32."""

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
from zeroexp.placement import Tier


class Zeroexp:
    """``options`` are keys of the ``zero`` section, and ``offload`` (its kind), ``folder`` (of swap
    files) and ``clip``; everything else that matters here is a default."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        zero = dict(options)
        clip, folder = zero.pop("clip", None), zero.pop("folder", None)
        config = Config.from_mapping(
            {
                "offload": {"kind": zero.pop("offload", "none"), "nvme": {"dir": folder}},
                "zero": zero,
                "precision": {"compute": "fp32"},
                "optim": {
                    "kind": "adamw",
                    "lr": LEARNING_RATE,
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": WEIGHT_DECAY,
                    "decay_norm_and_bias": True,
                },
                "trainer": {"devices": dist.get_world_size(), "gradient_clip_val": clip},
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
        padding is the ledger's word. What is on disk counts nothing."""
        segments = self.engine.model.segments
        values = [s.full if s.home is None else s.home.resident for s in segments]
        masters = [s.master for s in segments if s.has_master_copy]
        return State(
            params=[t for t in values if t is not None],
            grads=[
                s.grads.owned
                for s in segments
                if s.spec.trainable and s.placement.grads.tier is not Tier.NVME
            ],
            optim=[t for t in masters if t is not None]
            + [t for s in self.engine.steppers for t in tensors_in(dict(s.face.state))],
            padding_bytes=self.engine.ledger.padding_bytes(),
        )


def start(model: nn.Module, options: Mapping[str, Any]) -> Zeroexp:
    return Zeroexp(model, options)
