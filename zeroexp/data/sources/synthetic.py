"""Tokens computed from a seed: no file, any length, something to learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroexp.data.permutation import mix
from zeroexp.data.sources.source import Split, tail

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NUM_TOKENS = 1 << 24
"""Length of the stream (both splits)."""


class SyntheticTokens:
    """Uniform tokens, every second of which follows from the one before.

    Position 2i holds a hash of (seed, i) modulo ``num_ids``, position 2i + 1 the token before it
    plus a constant, so a model that learns can halve the entropy of ln(num_ids) nats per token, and
    one that does not learn shows it.
    """

    name = "synthetic tokens"

    def __init__(self, num_ids: int, seed: int, val_fraction: float) -> None:
        self.num_ids = num_ids
        self._seed = seed
        self._val_tail = tail(NUM_TOKENS, val_fraction)

    def num_tokens(self, split: Split) -> int:
        return self._val_tail if split == "val" else NUM_TOKENS - self._val_tail

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        import numpy as np

        if split == "val":
            start += NUM_TOKENS - self._val_tail
        position = np.arange(start, start + count, dtype=np.uint64)
        # splitmix64 over the pair's number; uint64 arithmetic wraps, which is what it wants
        z = (position >> np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(self._seed))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        shift = np.uint64(1 + self._seed % max(1, self.num_ids - 1))
        follows = position & np.uint64(1)
        tokens = (z % np.uint64(self.num_ids) + follows * shift) % np.uint64(self.num_ids)
        return np.asarray(tokens, dtype=np.int64)
