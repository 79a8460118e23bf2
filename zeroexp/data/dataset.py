"""Sequences cut from a stream of tokens, as tensors. Suffixes: B batch, L position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zeroexp.data.plan import num_sequences
from zeroexp.data.sampler import PADDING
from zeroexp.data.sources.source import Source, Split
from zeroexp.errors import ConfigError, Problem
from zeroexp.models.loss import IGNORED

_SCAN_TOKENS = 1 << 26
"""Streams up to this length are read once at the start to check their token ids (about 0.1 s)."""


class Batch(TypedDict):
    """``targets[b, i]`` is the token after ``tokens[b, i]``; both (B, L) int64."""

    tokens: Tensor
    targets: Tensor


class TokenSequences(Dataset[Batch]):
    """Sequence i covers ``tokens[i*seq_len : (i+1)*seq_len]`` and is asked for the token after
    each.

    Items are a :class:`Batch` without the leading axis. Index :data:`zeroexp.data.sampler.PADDING`
    is a sequence of zeros whose targets are all ignored.

    Raises :class:`ConfigError` for token ids that the model has no embedding for: at once where the
    stream is short enough to look at whole, else with the first such sequence.
    """

    def __init__(self, source: Source, split: Split, seq_len: int, vocab_size: int) -> None:
        self.source = source
        self.split: Split = split
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_tokens = source.num_tokens(split)
        if source.num_ids is None and self.num_tokens <= _SCAN_TOKENS:
            for start in range(0, self.num_tokens, 1 << 20):
                count = min(1 << 20, self.num_tokens - start)
                self._check(torch.from_numpy(source.read(split, start, count)), start)

    def __len__(self) -> int:
        return num_sequences(self.num_tokens, self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        if index == PADDING:
            tokens_L = torch.zeros(self.seq_len, dtype=torch.int64)
            return {"tokens": tokens_L, "targets": torch.full_like(tokens_L, IGNORED)}
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} outside 0..{len(self) - 1}")
        start = index * self.seq_len
        stream = torch.from_numpy(self.source.read(self.split, start, self.seq_len + 1))
        self._check(stream, start)
        return {"tokens": stream[:-1], "targets": stream[1:]}

    def _check(self, tokens_L: Tensor, start: int) -> None:
        if not len(tokens_L):
            return
        low, high = (int(t) for t in tokens_L.aminmax())
        if low >= 0 and high < self.vocab_size:
            return
        bad = high if high >= self.vocab_size else low
        position = start + int((tokens_L == bad).nonzero()[0])
        raise ConfigError(
            [
                Problem(
                    "model.vocab_size",
                    f"{self.source.name} holds token id {bad} at position {position} of the "
                    f"{self.split} split, but the model knows ids 0 to {self.vocab_size - 1}.",
                    f"Use model.vocab_size={high + 1} or more"
                    if low >= 0
                    else "Check data.dtype: token ids are not negative",
                )
            ]
        )


def stack(items: Sequence[Batch]) -> Batch:
    """Items of a dataset as one :class:`Batch`."""
    return {
        "tokens": torch.stack([item["tokens"] for item in items]),
        "targets": torch.stack([item["targets"] for item in items]),
    }
