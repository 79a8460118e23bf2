"""Whether the ranks of a pipe read the same batch: its first stage takes the inputs from it, its
last one the targets."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from zeroexp.comm import Group
from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import ModelError
from zeroexp.pipeline.runtime.tree import tensors_of


def check_same_batch(batch: Any, step: str, pipe: Group) -> None:
    """Raises :class:`ModelError` on every rank of ``pipe`` where one has another ``batch``
    (collective)."""
    notes = exchange_notes(pipe, fingerprint(batch), "fingerprint of the batch")
    for rank, note in zip(pipe.ranks, notes, strict=True):
        if note != notes[0]:
            raise ModelError(
                f"{step}: ranks {pipe.ranks[0]} and {rank} are in one pipe and have read different "
                f"batches ({_shapes(notes[0])} and {_shapes(note)}). Lightning's sampler gives them"
                " the same; a sampler of one's own takes"
                " **trainer.strategy.distributed_sampler_kwargs, and what is random in a dataset"
                " has to follow from the sample's number"
            )


def fingerprint(batch: Any) -> list[list[Any]]:
    """Shape, dtype and checksum of each tensor of ``batch``."""
    return [
        [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), _checksum(tensor)]
        for tensor in tensors_of(batch)
    ]


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _shapes(note: list[list[Any]]) -> str:
    return ", ".join(f"{dtype}{shape} {crc:08x}" for shape, dtype, crc in note) or "no tensors"
