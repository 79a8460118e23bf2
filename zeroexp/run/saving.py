"""Checkpoints of train.py: every so many steps and at the end, the newest few kept, none of them
ever half-written.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from zeroexp.run.directory import RunDirectory
from zeroexp.run.measure import StepClock
from zeroexp.run.resume import checkpoint_name, checkpoints_in


class StepCheckpoints(Callback):
    """Saves ``checkpoints/step-<n>.ckpt`` every ``every`` steps and after the last one; keeps the
    newest ``keep``.

    A checkpoint is written under another name and renamed when all ranks have finished it, and an
    older one is deleted only then: a reader finds the old or the new, and a rank that dies on the
    way costs the new one only.

    Args:
        directory: the run's directory.
        every: optimizer steps between checkpoints.
        keep: number of checkpoints that stay.
        clock: paused while a checkpoint is written.
    """

    def __init__(self, directory: RunDirectory, every: int, keep: int, clock: StepClock) -> None:
        self._directory = directory
        self._every = every
        self._keep = keep
        self._clock = clock
        self._saved_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With accumulation global_step stands still for several batches.
        if trainer.global_step % self._every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._saved_at:
            return
        with self._clock.paused():
            folder = self._directory.checkpoints
            folder.mkdir(exist_ok=True)
            final = folder / checkpoint_name(step)
            scratch = final.with_name(f".{final.name}.part")
            try:
                trainer.save_checkpoint(scratch)  # a collective; on return every rank has finished
            except Exception:
                # What is half-written is of no use, and on a full disk the last words need room.
                with contextlib.suppress(OSError):
                    scratch.unlink()
                raise
            if trainer.is_global_zero:
                os.replace(scratch, final)
                for old in checkpoints_in(folder)[: -self._keep]:
                    old.unlink(missing_ok=True)
        self._saved_at = step
