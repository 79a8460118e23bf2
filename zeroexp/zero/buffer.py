"""Memory whose identity stays while its pages come and go.

Autograd saves *views* of weights. A released buffer must therefore keep its identity: the same
storage is freed and refilled, and never handed to another unit while a view is alive, or backward
reads another unit's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp import ops

_RANGE_FROM = 1 << 20
"""Bytes from which a host buffer gets an address range of its own, on huge pages; below, resizing
is as fast."""


class FlatBuffer:
    """A flat tensor ``[numel]`` that can be released and acquired again; ``tensor`` is the same
    object throughout.

    On the host a large buffer is an address range whose pages are given back; elsewhere the storage
    is resized.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.nbytes = numel * dtype.itemsize
        self.held = True
        self._range: ops.HostRange | None = None
        if device.type == "cpu" and self.nbytes >= _RANGE_FROM:
            self._range = ops.HostRange(self.nbytes)
            self.tensor: Tensor = self._range.tensor(dtype, numel)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    def acquire(self) -> None:
        """Bring the memory back; its contents are undefined."""
        if not self.held and self._range is None:
            self.tensor.untyped_storage().resize_(self.nbytes)
        self.held = True

    def release(self) -> None:
        """Give the memory back to the system. ``tensor`` must not be read until it is acquired and
        filled again."""
        if not self.held:
            return
        if self._range is not None:
            self._range.release()
        else:
            self.tensor.untyped_storage().resize_(0)
        self.held = False
