"""A batch becomes micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.runtime.tree import map_tensors, tensors_of


class Mapped(Sequence[Any]):
    """``make`` of each of ``values``, when it is asked for: inside a run, which tells the other
    ranks of its errors."""

    def __init__(self, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self._values, self._make = values, make

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._values[index])


class Parts(Sequence[Any]):
    """:func:`split_batch`, when it is asked for."""

    def __init__(self, batch: Any, micro_batches: int) -> None:
        self._batch, self._micro_batches = batch, micro_batches

    @cached_property
    def _parts(self) -> list[Any]:
        return split_batch(self._batch, self._micro_batches)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """``micro_batches`` equal parts of a nested batch, cut along dimension 0 of its tensors; those
    without dimensions, and what is no tensor, go into each.

    Raises :class:`ConfigError` with the nearest sizes that divide, or where the tensors' first
    dimensions differ.
    """
    if micro_batches < 1:
        _refuse("micro_batches", f"{micro_batches} is not a count.", "Use 1 or more")
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if not sizes:
        _refuse("micro_batches", "the batch has no tensor to cut.", "Give one with samples")
    if len(sizes) > 1:
        _refuse(
            "micro_batches",
            f"the batch's tensors have {', '.join(map(str, sorted(sizes)))} samples.",
            "Give all the same first dimension",
        )
    size = sizes.pop()
    if size % micro_batches or not size:
        _refuse(
            "micro_batches",
            f"{size} samples do not make {micro_batches} equal micro-batches.",
            f"Use {_nearest(size, micro_batches)}",
        )
    part = size // micro_batches

    def cut(start: int) -> Any:
        def of(tensor: Tensor) -> Tensor:
            return tensor[start : start + part] if tensor.dim() else tensor

        return map_tensors(of, batch)

    return [cut(k * part) for k in range(micro_batches)]


def _nearest(size: int, micro_batches: int) -> str:
    below = size // micro_batches * micro_batches
    samples = [below, below + micro_batches] if below else [micro_batches]
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    lower = [d for d in divisors if d < micro_batches][-1:]
    upper = [d for d in divisors if d > micro_batches][:1]
    counts = lower + upper
    text = f"{' or '.join(map(str, samples))} samples"
    if counts:
        text += f", or {' or '.join(map(str, counts))} micro-batch{'es' * (counts != [1])}"
    return text


def _refuse(key: str, problem: str, fix: str) -> None:
    raise ConfigError([Problem(f"pipeline.{key}", problem, fix)])
