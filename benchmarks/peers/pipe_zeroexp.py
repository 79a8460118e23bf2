"""zeroexp's pipeline with torch's fused AdamW, stage 0."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.models import next_token_loss
from benchmarks.peer import fused_adamw
from benchmarks.pipe_work import Batch, PipeWork
from zeroexp.pipe_engine import PipeEngine
from zeroexp.pipeline.action import Kind
from zeroexp.pipeline.runtime.owner import Owner

Stamp = tuple[str, int, float, float]
"""Of an action: its kind and stage, and the monotonic seconds when it began and ended."""


class Stamped:
    """An owner of stages that also writes down when each forward and backward runs."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.stamps: list[Stamp] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    @contextmanager
    def _stamped(
        self, kind: Kind, stage: int, inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        with inner:
            begin = time.monotonic()
            yield
            self.stamps.append((kind.name, stage, begin, time.monotonic()))

    def forward(self, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        return self._stamped(Kind.FORWARD, stage, self._owner.forward(stage, micro_batch))

    def backward(
        self, stage: int, micro_batch: int, kind: Kind, last: bool
    ) -> AbstractContextManager[Any]:
        inner = self._owner.backward(stage, micro_batch, kind, last)
        return self._stamped(kind, stage, inner)


class ZeroexpPipe:
    def __init__(self, work: PipeWork, options: Mapping[str, Any]) -> None:
        config = {
            "zero": {"stage": 0},
            "precision": {"compute": "fp32"},
            "data": {"micro_batch_size": work.samples * work.micro_batches},
            "trainer": {"devices": work.stages, "gradient_clip_val": None},
            "pipeline": {
                "stages": work.stages,
                "micro_batches": work.micro_batches,
                "cut": "layers",
                **options,
            },
        }
        model = work.model()
        self.engine = PipeEngine(
            model, fused_adamw(model.parameters()), config, loss=next_token_loss
        )

    def passes(self, batch: Batch) -> float:
        return self.engine.train_micro_batches(batch.inputs, batch.targets)

    def update(self) -> None:
        self.engine.step()

    def stamps(self, batch: Batch) -> list[Stamp]:
        """Those of one batch's passes."""
        executor = self.engine.executor
        owner, stamped = executor.owner, Stamped(executor.owner)
        executor.owner = stamped
        try:
            self.passes(batch)
        finally:
            executor.owner = owner
        return stamped.stamps


def start(work: PipeWork, options: Mapping[str, Any]) -> ZeroexpPipe:
    """``options`` are keys of the ``pipeline`` section."""
    return ZeroexpPipe(work, options)
