"""The configured data for Lightning: the same sequences per step on any number of ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from zeroexp.config import Config
from zeroexp.data.dataset import Batch
from zeroexp.data.loader import Loaders, TrainLoader


class TokenDataModule(pl.LightningDataModule):
    """Loaders of ``config.data`` for this rank.

    The Trainer needs ``use_distributed_sampler=False``: the loaders deal out the data themselves
    (Lightning refuses to replace their sampler otherwise). Resuming continues with the step after
    the saved one, also with another number of ranks or micro-batches.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self._loaders: Loaders | None = None
        self._saved_accumulate: int | None = None

    def setup(self, stage: str) -> None:
        if self._loaders is None:
            ranks = self._data_ranks()
            self._loaders = Loaders(
                self.config, data_rank=ranks["rank"], data_ranks=ranks["num_replicas"]
            )

    def train_dataloader(self) -> TrainLoader:
        self._recount_progress()
        return self._ready().train()

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        loader = self._ready().val()
        return [] if loader is None else loader

    def test_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._ready().predict()

    def state_dict(self) -> dict[str, Any]:
        return {"accumulate_grad_batches": self.config.trainer.accumulate_grad_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_accumulate = state_dict["accumulate_grad_batches"]

    def _ready(self) -> Loaders:
        if self._loaders is None:
            self.setup("fit")
        assert self._loaders is not None  # for the type checker: setup made them
        return self._loaders

    def _data_ranks(self) -> dict[str, int]:
        """This rank among those that read different data, as the strategy counts them."""
        kwargs = getattr(
            getattr(self.trainer, "strategy", None), "distributed_sampler_kwargs", None
        )
        return kwargs if kwargs is not None else {"num_replicas": 1, "rank": 0}

    def _recount_progress(self) -> None:
        """After a resume, count the micro-batches of this epoch as this run cuts them.

        The Trainer decides by that count when to step. One saved with other micro-batches per step
        would make the first step early or late, and so would one saved in the middle of a step,
        whose gradients are gone.
        """
        trainer, saved = self.trainer, self._saved_accumulate
        self._saved_accumulate = None
        if trainer is None or saved is None or not trainer.fit_loop.restarting:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        trackers: list[Any] = [progress.total, progress.current]
        for counts in trackers:
            behind = counts.processed - counts.completed  # saved inside on_train_batch_end: 1
            whole_steps = counts.processed // saved * trainer.accumulate_grad_batches
            counts.ready = counts.started = counts.processed = whole_steps
            counts.completed = max(0, whole_steps - behind)


def data_for(module: pl.LightningModule, config: Config) -> TokenDataModule | None:
    """The data module to train ``module`` with, or None where it has a ``train_dataloader``
    itself."""
    if type(module).train_dataloader is not pl.LightningModule.train_dataloader:
        return None
    return TokenDataModule(config)
