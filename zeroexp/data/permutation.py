"""A shuffle of ``range(size)`` that takes no memory.

A permutation kept as a list costs 8 bytes per sequence and has to be drawn again on every rank; a
keyed bijection gives element ``i`` by itself, the same on every machine and torch version, and
makes resuming at any position free. Construction: a balanced Feistel network (Luby and Rackoff,
1988) over the smallest even number of bits that holds ``size``, with cycle walking (Black and
Rogaway, 2002) for the values that fall outside.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 8


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64, Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """The shuffle of ``range(size)`` that belongs to ``(seed, epoch)``; ``p[i]`` is the i-th
    element."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got size {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half) - 1
        key = mix(mix(seed & _MASK) ^ (epoch & _MASK))
        self._keys = tuple(mix(key + r) for r in range(_ROUNDS))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} outside 0..{self.size - 1}")
        value = self._encrypt(index)
        while (
            value >= self.size
        ):  # a bijection's cycle comes back into the range: at most 4x the work on average
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._half_mask)
        return (left << self._half) | right
