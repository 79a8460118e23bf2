"""A nested value as bytes: what its structure is, and how its tensors lie in one buffer.

A message begins with a prefix whose first number says what it is; the tensors follow, each at a
multiple of the prefix's size. So the receiver, who expects a message of the structure of the last
one, finds out from the first bytes whether it is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroexp.errors import ModelError
from zeroexp.pipeline.runtime.tree import Shape, flatten, unflatten

PREFIX = 64
"""Bytes before the tensors, and the alignment of each: that of torch's own allocations."""

SAME = 0
"""Prefix of a message with the structure of the last one; a positive number is the length of a
header that follows."""
FAILED = -1
"""Prefix of a message that will not come: its sender's run has failed."""

# By name, so that a header names a dtype and nothing else.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True)
class TensorMeta:
    """``takes_grad``: a gradient goes back for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    takes_grad: bool

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class Structure:
    """Everything about a value but the contents of its tensors."""

    def __init__(self, shape: Shape, tensors: tuple[TensorMeta, ...]) -> None:
        self.shape = shape
        self.tensors = tensors
        self.offsets = []
        end = PREFIX
        for meta in tensors:
            self.offsets.append(end)
            end += -(-meta.nbytes // PREFIX) * PREFIX
        self.nbytes = end
        """Bytes of a message."""
        self.payload = sum(meta.nbytes for meta in tensors)
        """Bytes of the tensors alone."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self.tensors == other.tensors and self.shape == other.shape

    __hash__ = None  # type: ignore[assignment]

    def encode(self) -> bytes:
        metas = [
            [str(m.dtype).removeprefix("torch."), list(m.shape), m.takes_grad] for m in self.tensors
        ]
        return json.dumps([self.shape, metas]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        shape, metas = json.loads(data)
        return cls(shape, tuple(TensorMeta(DTYPES[d], tuple(s), bool(g)) for d, s, g in metas))


class Message(NamedTuple):
    """A nested value taken apart."""

    structure: Structure
    tensors: list[Tensor]

    @property
    def value(self) -> Any:
        return unflatten(self.structure.shape, self.tensors)


def describe(value: Any) -> Message:
    """A value taken apart. Raises :class:`ModelError` for what cannot be sent."""
    shape, tensors = flatten(value)
    metas = tuple(TensorMeta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)
    for meta in metas:
        if str(meta.dtype).removeprefix("torch.") not in DTYPES:
            raise ModelError(f"a tensor of dtype {meta.dtype} cannot go from stage to stage")
    return Message(Structure(shape, metas), tensors)


def pack(buffer: Tensor, mark: int, structure: Structure, tensors: list[Tensor]) -> None:
    """Write prefix and tensors into ``buffer`` (uint8, at least ``structure.nbytes``)."""
    buffer[:8].view(torch.int64).fill_(mark)
    for place, tensor in zip(places(buffer, structure), tensors, strict=True):
        place.copy_(tensor.detach())


def places(buffer: Tensor, structure: Structure) -> list[Tensor]:
    """The tensors of a message as views of its buffer."""
    found = []
    for offset, meta in zip(structure.offsets, structure.tensors, strict=True):
        flat = buffer[offset : offset + meta.nbytes].view(meta.dtype)
        found.append(flat.view(meta.shape))
    return found


def mark_of(buffer: Tensor) -> int:
    """The prefix's number."""
    return int(buffer[:8].view(torch.int64).item())
