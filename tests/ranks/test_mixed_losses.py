"""Losses whose dtype differs from rank to rank: what is logged and reduced is their true mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy_lab import Net, loader, trainer, zero
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOSSES = (1.5, 2.25)
"""By rank; with their mean 1.875 exact in every dtype."""


class Mixed(Net):
    """The loss of rank 1 is of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.loss_dtype = dtype

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = dist.get_rank()
        loss = super().training_step(batch, batch_idx)
        loss = (loss * 0.0 + LOSSES[rank]).to(self.loss_dtype if rank == 1 else torch.float32)
        self.log("own", loss, sync_dist=True)
        self.log("epoch", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss


def logged(stage: int) -> dict[str, list[float]]:
    found = {}
    for dtype in DTYPES:
        run = trainer(zero(stage=stage, timeout=20))
        run.fit(Mixed(dtype), loader(2))
        found[str(dtype)] = [float(run.callback_metrics[key]) for key in ("own", "epoch")]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_ls11_the_mean_of_losses_that_differ_in_dtype(ranks: Any, stage: int) -> None:
    """LS-11: the mean that Lightning logs is right on every rank, in a step and over an epoch."""
    for found in ranks(2)(logged, stage):
        assert found == {str(dtype): [1.875, 1.875] for dtype in DTYPES}


def reduced(dtype: torch.dtype, numel: int) -> tuple[str, list[float]]:
    """What the strategy's own reduction gives (an error's text instead of values)."""
    strategy = zero(stage=0, timeout=20)
    rank = dist.get_rank()
    found: list[float] = []

    class Reduces(Net):
        def on_train_start(self) -> None:
            mine = torch.full((numel,), LOSSES[rank], dtype=dtype if rank == 1 else torch.float32)
            found.extend(strategy.reduce(mine, reduce_op="mean").double().tolist())

    try:
        trainer(strategy).fit(Reduces(), loader(1))
    except Exception as error:
        return str(error), []
    return "", found


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_ls11_a_reduction_of_tensors_that_differ_in_dtype(ranks: Any, dtype: torch.dtype) -> None:
    """LS-11: the true mean on every rank, or on every rank an error that names both dtypes."""
    for numel in (1, 8):
        for said, found in ranks(2)(reduced, dtype, numel):
            if said:
                assert "float32" in said and str(dtype).removeprefix("torch.") in said
            else:
                assert found == [1.875] * numel
