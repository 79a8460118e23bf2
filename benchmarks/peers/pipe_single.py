"""The whole model in one process, micro-batch after micro-batch: no pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.models import next_token_loss
from benchmarks.peer import fused_adamw
from benchmarks.pipe_work import Batch, PipeWork


class Single:
    def __init__(self, work: PipeWork) -> None:
        model = work.model()
        self.optimizer = fused_adamw(model.parameters())
        self.stage = work.part(model.pipeline_layers(), 0)

    def passes(self, batch: Batch) -> float:
        losses = []
        for inputs, targets in zip(*batch, strict=True):
            loss = next_token_loss(self.stage(inputs), targets)
            torch.autograd.backward(loss / len(batch.inputs))
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def start(work: PipeWork, options: Mapping[str, object]) -> Single:
    """``work`` has one stage."""
    return Single(work)
