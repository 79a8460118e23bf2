"""DeepSpeed's engine, stages 0-3, with torch's fused AdamW given to it as the client optimizer.

Its defaults are kept but for two: gradients are not clipped (its default is 1.0), and nothing is
printed per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # lives in .venv-peers
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peer import State, fused_adamw, local_tensor, tensors_in

# Where ZeRO keeps its flat float32 weights and its reduced gradients, over stages and releases. A
# name that is missing counts nothing here and is still found by the walk over all live tensors.
MASTER_ATTRIBUTES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
GRADIENT_ATTRIBUTES = ("averaged_gradients", "grad_partitions_flat_buffer")


class DeepSpeed:
    def __init__(self, model: nn.Module, stage: int) -> None:
        # Batch sizes count samples; the engine only checks that they agree with each other.
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "train_batch_size": dist.get_world_size(),
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=fused_adamw(model.parameters()), config=config
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
    return DeepSpeed(model, int(options["stage"]))
