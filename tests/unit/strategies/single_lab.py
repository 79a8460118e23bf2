"""A small module and a quiet Trainer for one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroexp.strategies import strategy_class

ZeroStrategy = strategy_class("lightning.pytorch")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).pow(2).mean()
        self.seen.append((torch.is_inference_mode_enabled(), loss.is_inference()))
        return loss

    test_step = validation_step
    predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(rows: int = 6) -> DataLoader[Any]:
    values = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(values, batch_size=2)  # type: ignore[arg-type]


def trainer(strategy: Any, **kwargs: Any) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(strategy=strategy, **{**quiet, **kwargs})


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]
