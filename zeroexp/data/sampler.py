"""Which sequences each rank reads, and in which order.

Training: one shuffled order per epoch is cut into global batches of ``batch_size`` sequences;
global batch k is what optimizer step k learns from, whatever the number of ranks and micro-batches.
Inside a global batch the sequences are dealt out micro-batch by micro-batch, and in each
micro-batch rank by rank, so a position in the order is one number that means the same for every
world size. Sequences that do not fill a last global batch wait for the next epoch's shuffle.

Evaluation: the order of the data, the same number of equally large batches on every rank; what is
missing at the tail is :data:`PADDING`, which the dataset turns into a sequence without targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from zeroexp.data.permutation import Permutation

PADDING = -1
"""Index of a sequence that is not there: its targets are all ignored."""


class Position(TypedDict):
    """How far training has read: ``sequences`` of all ranks together are done in epoch
    ``epoch``."""

    epoch: int
    sequences: int


class TrainSampler:
    """Yields this rank's micro-batches (lists of sequence indices) from the current position to the
    epoch's end.

    ``batch_size`` counts sequences per optimizer step over all data ranks and must be a multiple of
    ``data_ranks * accumulate``. Iterating does not move the position (loaders read ahead):
    :meth:`advance` does, once per micro-batch that was handed to the training loop.
    """

    def __init__(
        self,
        num_sequences: int,
        batch_size: int,
        *,
        data_rank: int = 0,
        data_ranks: int = 1,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        if not 0 <= data_rank < data_ranks:
            raise ValueError(f"data_rank {data_rank} outside 0..{data_ranks - 1}")
        if batch_size < 1 or batch_size % (data_ranks * accumulate):
            raise ValueError(
                f"batch_size {batch_size} is not a multiple of {data_ranks} data ranks x "
                f"{accumulate} micro-batches"
            )
        if num_sequences < batch_size:
            raise ValueError(f"{num_sequences} sequences do not fill one batch of {batch_size}")
        self.num_sequences = num_sequences
        self.batch_size = batch_size
        self.micro_batch_size = batch_size // (data_ranks * accumulate)
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.accumulate = accumulate
        self.seed = seed
        self.epoch = 0
        self._sequences = 0

    @property
    def steps_per_epoch(self) -> int:
        return self.num_sequences // self.batch_size

    @property
    def sampler(self) -> TrainSampler:
        """Lightning announces the epoch to ``loader.batch_sampler.sampler``."""
        return self

    def __len__(self) -> int:
        """Micro-batches per rank and epoch."""
        return self.steps_per_epoch * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        order = Permutation(self.num_sequences, self.seed, self.epoch)
        across_ranks = self.micro_batch_size * self.data_ranks
        mine = self.micro_batch_size * self.data_rank
        for start in range(self._sequences, self.steps_per_epoch * self.batch_size, across_ranks):
            first = start + mine
            yield [order[i] for i in range(first, first + self.micro_batch_size)]

    def advance(self) -> None:
        """Count one micro-batch (on every rank) as read; the end of an epoch begins the next."""
        self._sequences += self.micro_batch_size * self.data_ranks
        if self._sequences >= self.steps_per_epoch * self.batch_size:
            self.epoch, self._sequences = self.epoch + 1, 0

    def set_position(self, step: int) -> None:
        """Go on with optimizer step ``step`` (counted from 0 over all epochs)."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self.epoch, within = divmod(step, self.steps_per_epoch)
        self._sequences = within * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` if it lies ahead.

        Never goes back: after a resume the loop's own epoch counter may be behind, and data would
        be read twice.
        """
        if epoch > self.epoch:
            self.epoch, self._sequences = epoch, 0

    def state_dict(self) -> Position:
        return {"epoch": self.epoch, "sequences": self._sequences}

    def load_state_dict(self, state: Position) -> None:
        """Continue where ``state`` was taken, also with another number of ranks or micro-batches.

        A state inside an optimizer step goes back to the beginning of that step: the gradients of
        its first micro-batches are gone.
        """
        step = state["sequences"] // self.batch_size
        self.epoch, self._sequences = state["epoch"], step * self.batch_size
        if step >= self.steps_per_epoch:
            self.epoch, self._sequences = self.epoch + 1, 0


class EvalSampler:
    """Yields this rank's batches of every sequence in order, the tail filled with :data:`PADDING`.

    All ranks yield ``ceil(num_sequences / (micro_batch_size * data_ranks))`` batches.
    """

    def __init__(
        self, num_sequences: int, micro_batch_size: int, *, data_rank: int = 0, data_ranks: int = 1
    ) -> None:
        if not 0 <= data_rank < data_ranks:
            raise ValueError(f"data_rank {data_rank} outside 0..{data_ranks - 1}")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size {micro_batch_size} is not positive")
        self.num_sequences = num_sequences
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks

    def __len__(self) -> int:
        return -(-self.num_sequences // (self.micro_batch_size * self.data_ranks))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            first = (batch * self.data_ranks + self.data_rank) * self.micro_batch_size
            yield [
                i if i < self.num_sequences else PADDING
                for i in range(first, first + self.micro_batch_size)
            ]
