"""Flat buffers that are reused from step to step, so that the steady state allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.ledger import Ledger
from zeroexp.placement import Tier

_HUGE_FROM = 1 << 20
"""Bytes from which a host buffer is worth huge pages: fresh small pages cost five times as much to
fill."""


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero-filled flat tensor ``[numel]``, on huge pages where it is large and on the host."""
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_FROM:
        return ops.host_zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class BufferPool:
    """Buffers for values in transit. Only for memory that no autograd graph holds views of."""

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        label: str,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self._device = device
        self._tier = tier
        self._ledger = ledger
        self._label = label
        self._free: list[Tensor] = []
        self._nbytes = 0  # of all buffers, free and taken

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of at least ``numel`` elements as raw bytes (view it as ``dtype``); contents
        undefined."""
        nbytes = numel * dtype.itemsize
        fitting = [b for b in self._free if nbytes <= b.numel() <= max(2 * nbytes, 4096)]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [b for b in self._free if b is not best]
        else:
            best = flat_zeros(nbytes, torch.uint8, self._device)
            self._nbytes += nbytes
            self._ledger.hold("", "workspace", self._tier, self._nbytes, label=self._label)
        return best

    def give(self, raw: Tensor) -> None:
        """Return what :meth:`take` gave."""
        self._free.append(raw)

    def drop(self) -> None:
        """Forget the buffers that nobody has: the next :meth:`take` makes new ones."""
        self._nbytes -= sum(raw.numel() for raw in self._free)
        self._free = []
        self._ledger.hold("", "workspace", self._tier, self._nbytes, label=self._label)
