"""DeepSpeed's engine, stages 0-3, with torch's fused AdamW given to it as the client optimizer, or
with its own CPU Adam where the optimizer is offloaded (it refuses another one there).

Its defaults are kept but for two: gradients are not clipped (its default is 1.0), and nothing is
printed per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # lives in .venv-peers
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peer import State, fused_adamw, local_tensor, tensors_in
from benchmarks.work import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY

# Where ZeRO keeps its flat float32 weights and its reduced gradients, over stages and releases. A
# name that is missing counts nothing here and is still found by the walk over all live tensors.
MASTER_ATTRIBUTES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
GRADIENT_ATTRIBUTES = ("averaged_gradients", "grad_partitions_flat_buffer")


def _cpu_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import (  # type: ignore[import-not-found, unused-ignore]
        DeepSpeedCPUAdam,
    )

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        params, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    return optimizer


class DeepSpeed:
    """``options``: ``stage``, and for an offloaded optimizer ``offload`` (its device), ``folder``
    and further keys of that section."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        section = dict(options)
        zero: dict[str, Any] = {"stage": section.pop("stage")}
        device, folder = section.pop("offload", None), section.pop("folder", None)
        if device is not None:
            zero["offload_optimizer"] = {"device": device, **section}
            if folder is not None:
                zero["offload_optimizer"]["nvme_path"] = folder
        # Batch sizes count samples; the engine only checks that they agree with each other.
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "train_batch_size": dist.get_world_size(),
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        }
        adamw = fused_adamw if device is None else _cpu_adamw
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config
        )

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()

    def state(self) -> State:
        params = list(self.engine.module.parameters())
        outer = self.engine.optimizer
        inner = getattr(outer, "optimizer", outer)
        masters = [t for name in MASTER_ATTRIBUTES for t in tensors_in(getattr(outer, name, ()))]
        grads = [t for name in GRADIENT_ATTRIBUTES for t in tensors_in(getattr(outer, name, ()))]
        return State(
            params=[local_tensor(getattr(p, "ds_tensor", p.data)) for p in params],
            grads=grads + [local_tensor(p.grad) for p in params if p.grad is not None],
            # Masters first: in float32 they may be the very storage of the parameters and then
            # count once, with these.
            optim=masters + list(tensors_in(dict(inner.state))),
        )


def start(model: nn.Module, options: Mapping[str, Any]) -> DeepSpeed:
    return DeepSpeed(model, options)
