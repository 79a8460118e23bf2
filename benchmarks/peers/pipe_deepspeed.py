"""DeepSpeed's pipeline with torch's fused AdamW as the client optimizer; its only schedule is 1F1B.

A batch's passes and the step are one call of its engine. Its defaults are kept but for two:
gradients are not clipped, and nothing is printed per step.
"""

from __future__ import annotations

from collections.abc import Mapping

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # lives in .venv-peers
from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found, unused-ignore]

from benchmarks.models import next_token_loss
from benchmarks.peer import fused_adamw
from benchmarks.pipe_work import Batch, PipeWork


class DeepSpeedPipe:
    def __init__(self, work: PipeWork) -> None:
        deepspeed.init_distributed("gloo")
        module = PipelineModule(
            layers=[layer for _, layer in work.model().pipeline_layers()],
            num_stages=work.stages,
            loss_fn=next_token_loss,
            partition_method="uniform",
        )
        config = {
            "train_micro_batch_size_per_gpu": work.samples,
            "gradient_accumulation_steps": work.micro_batches,
            "train_batch_size": work.samples * work.micro_batches,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=fused_adamw(module.parameters()), config=config
        )

    def passes(self, batch: Batch) -> float:
        return float(self.engine.train_batch(zip(*batch, strict=True)))

    def update(self) -> None:
        pass


def start(work: PipeWork, options: Mapping[str, object]) -> DeepSpeedPipe:
    return DeepSpeedPipe(work)
