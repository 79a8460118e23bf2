"""Loaders over the configured data: one micro-batch per iteration, for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from zeroexp.config import Config
from zeroexp.data.dataset import Batch, TokenSequences, stack
from zeroexp.data.plan import problems
from zeroexp.data.sampler import EvalSampler, Position, TrainSampler
from zeroexp.data.sources.registry import data_seed, open_source
from zeroexp.data.sources.source import Split
from zeroexp.errors import ConfigError


class TrainLoader(DataLoader[Batch]):
    """Micro-batches of one epoch per iteration, epoch after epoch, each shuffled anew.

    Keeps count of what it has handed out: :meth:`state_dict` is the position after the last batch
    given, also while worker processes read ahead, and a loader that loads it goes on with the next.
    Positions are counted over all ranks, so another number of ranks can continue.
    """

    def __init__(self, dataset: TokenSequences, sampler: TrainSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._train_sampler = sampler

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator will do
        for batch in super().__iter__():
            self._train_sampler.advance()
            yield batch

    def set_position(self, step: int) -> None:
        """Go on with optimizer step ``step``, counted from 0 over all epochs."""
        self._train_sampler.set_position(step)

    def state_dict(self) -> Position:
        return self._train_sampler.state_dict()

    def load_state_dict(self, state: Position) -> None:
        self._train_sampler.load_state_dict(state)


class Loaders:
    """The loaders of one rank. Opens the data once; makes a fresh loader per call.

    ``data_rank`` of ``data_ranks``: which part of every batch this rank reads.

    Raises :class:`ConfigError` with every problem of the data (missing, empty, too short for the
    batch, token ids beyond the model's vocabulary).
    """

    def __init__(
        self, config: Config, *, data_rank: int = 0, data_ranks: int | None = None
    ) -> None:
        found = problems(config)
        if found:
            raise ConfigError(found)
        self.config = config
        self.data_rank = data_rank
        self.data_ranks = config.data_ranks if data_ranks is None else data_ranks
        self._source = open_source(config)

    def train(self) -> TrainLoader:
        """This rank's training micro-batches, from the first step on."""
        dataset = self._dataset("train")
        sampler = TrainSampler(
            len(dataset),
            self.config.batch_size,
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
            accumulate=self.config.trainer.accumulate_grad_batches,
            seed=data_seed(self.config),
        )
        return TrainLoader(dataset, sampler, **self._options())

    def val(self) -> DataLoader[Batch] | None:
        """This rank's validation batches, or None without validation.

        The first ``trainer.val_batches`` times ``batch_size`` sequences of the split (fewer if it
        is shorter), whatever the number of ranks; every rank gets the same number of batches.
        """
        if not self.config.trainer.val_batches or not self.config.data.val_fraction:
            return None
        dataset = self._dataset("val")
        wanted = self.config.trainer.val_batches * self.config.batch_size
        return self._evaluation(dataset, min(len(dataset), wanted))

    def predict(self) -> DataLoader[Batch]:
        """This rank's batches of the whole validation split, or of the training split without
        one."""
        dataset = self._dataset("val" if self.config.data.val_fraction else "train")
        return self._evaluation(dataset, len(dataset))

    def _evaluation(self, dataset: TokenSequences, num_sequences: int) -> DataLoader[Batch]:
        sampler = EvalSampler(
            num_sequences,
            self.config.micro_batch_size,
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
        )
        return DataLoader(dataset, batch_sampler=sampler, **self._options())

    def _dataset(self, split: Split) -> TokenSequences:
        data, model = self.config.data, self.config.model
        built_in = model.kind != "external"
        vocab_size = model.vocab_size if built_in else torch.iinfo(torch.int64).max
        return TokenSequences(self._source, split, data.seq_len, vocab_size)

    def _options(self) -> dict[str, Any]:
        workers = self.config.data.workers
        return {
            "collate_fn": cast(Any, stack),
            "num_workers": workers,
            # An iterator draws the seed of its workers here, so that opening one moves nothing of
            # what a model draws: a resumed run opens another number of them.
            "generator": torch.Generator().manual_seed(self.config.trainer.seed),
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available() and self.config.trainer.accelerator != "cpu",
        }
