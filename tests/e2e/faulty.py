"""A LightningModule for ``model=external`` that fails in the way its argument says."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class Faulty(pl.LightningModule):
    """Next-token prediction by one linear layer, without a validation. ``fault``: none, raise,
    infinite, memory, exit, frozen, vector, hang, silent (no loss),
    save (killed over a half-written second checkpoint).
    """

    def __init__(self, fault: str = "none", rank: int = 1, vocab: int = 64) -> None:
        super().__init__()
        self.fault, self.culprit = fault, rank
        self.embed = nn.Embedding(vocab, 16)
        self.head = nn.Linear(16, vocab)
        if fault == "frozen":
            self.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_rank == self.culprit and batch_idx == 1:
            if self.fault == "raise":
                raise ValueError("boom")
            if self.fault == "memory":
                torch.empty(1 << 50)
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "hang":
                time.sleep(600)
        tokens = batch["tokens"] % 64
        logits = self.head(self.embed(tokens))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (batch["targets"] % 64).flatten())
        if self.fault == "infinite" and batch_idx == 1:
            loss = loss * float("nan")
        if self.fault == "silent":
            return None
        return loss.expand(2) if self.fault == "vector" else loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fault != "save" or self.global_step != 2 or self.global_rank != self.culprit:
            return
        replace = os.replace

        def killed(source: Any, target: Any) -> None:
            if str(target).endswith(".ckpt"):
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = killed  # type: ignore[assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
