"""torch.distributed.pipelining with fused AdamW over each stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.models import next_token_loss
from benchmarks.peer import fused_adamw
from benchmarks.pipe_work import Batch, PipeWork

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipelining:
    """It cuts the batch itself, so it gets it whole. Outputs are not asked for, which spares it
    putting the logits together."""

    def __init__(self, work: PipeWork, options: Mapping[str, Any]) -> None:
        rank = dist.get_rank()
        module = work.part(work.model().pipeline_layers(), rank)
        self.is_last = rank == work.stages - 1
        self.optimizer = fused_adamw(module.parameters())
        stage = PipelineStage(module, rank, work.stages, torch.device("cpu"))
        self.schedule = SCHEDULES[options["schedule"]](
            stage, work.micro_batches, loss_fn=next_token_loss
        )

    def passes(self, batch: Batch) -> float | None:
        if not self.is_last:
            self.schedule.step(torch.cat(batch.inputs), return_outputs=False)
            return None
        losses: list[Tensor] = []
        self.schedule.step(target=torch.cat(batch.targets), losses=losses, return_outputs=False)
        return float(torch.stack(losses).mean())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def start(work: PipeWork, options: Mapping[str, Any]) -> Pipelining:
    """``options``: ``schedule``. One stage a rank, so the first one has the inputs."""
    return Pipelining(work, options)
