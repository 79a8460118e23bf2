"""Memory whose address stays while its pages come and go.

Autograd saves *views* of weights. A released buffer must therefore keep its identity: the same storage is freed and
refilled, and never handed to another unit while a view is alive, or backward reads another unit's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FlatBuffer:
    """A flat tensor ``[numel]`` that can be released and acquired again; ``tensor`` is the same object throughout."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.nbytes = numel * dtype.itemsize
        self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self.held = True

    def acquire(self) -> None:
        """Bring the memory back; its contents are undefined."""
        if not self.held:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.held = True

    def release(self) -> None:
        """Give the memory back to the system. Reading ``tensor`` now is a fault."""
        if self.held:
            self.tensor.untyped_storage().resize_(0)
            self.held = False


class BufferPool:
    """Flat buffers that are reused from step to step, so that the steady state allocates nothing.

    Only for memory that no autograd graph holds views of (gradients on their way to the owner).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self.nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least ``numel`` elements; contents undefined."""
        nbytes = numel * dtype.itemsize
        fitting = [b for b in self._free if nbytes <= b.numel() <= max(2 * nbytes, 4096)]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [b for b in self._free if b is not best]
        else:
            best = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self.nbytes += nbytes
        return best

    def give(self, raw: Tensor) -> None:
        """Return what :meth:`take` gave."""
        self._free.append(raw)

    def clear(self) -> None:
        """Forget the free buffers."""
        self.nbytes -= sum(b.numel() for b in self._free)
        self._free = []
