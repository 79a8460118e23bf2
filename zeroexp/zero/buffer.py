"""Memory whose identity stays while its pages come and go.

Autograd saves *views* of weights. A released buffer must therefore keep its identity: the same
storage is freed and refilled, and never handed to another unit while a view is alive, or backward
reads another unit's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.ledger import Ledger
from zeroexp.placement import Tier

_RANGE_FROM = 1 << 20
"""Bytes from which a host buffer gets an address range of its own, on huge pages; below, resizing
is as fast."""


class SparePages:
    """The pages of the host buffer that was released last: they move on to the next one that is
    acquired, since fresh pages are zeroed by the system before a gather overwrites them.

    At most one buffer's pages are kept, and :meth:`drop` gives them back.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: ops.HostRange | None = None

    def offer(self, pages: ops.HostRange) -> None:
        """``pages`` was released."""
        if self._held is not pages:
            self.drop()
            self._hold(pages)

    def move_to(self, pages: ops.HostRange) -> None:
        """``pages`` is about to be filled."""
        if self._held is not None:
            if self._held is not pages:
                pages.take_pages(self._held)
            self._hold(None)

    def drop(self) -> None:
        """Give the pages back to the system."""
        if self._held is not None:
            self._held.release()
            self._hold(None)

    def _hold(self, pages: ops.HostRange | None) -> None:
        self._held = pages
        nbytes = pages.num_bytes if pages is not None else 0
        self._ledger.hold("", "workspace", Tier.DEVICE, nbytes, label="spare pages")


class FlatBuffer:
    """A flat tensor ``[numel]`` that can be released and acquired again; ``tensor`` is the same
    object throughout.

    On the host a large buffer is an address range whose pages go to ``spare``; elsewhere the
    storage is resized.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, spare: SparePages
    ) -> None:
        self._spare = spare
        self.nbytes = numel * dtype.itemsize
        self.held = True
        self._range: ops.HostRange | None = None
        if device.type == "cpu" and self.nbytes >= _RANGE_FROM:
            self._range = ops.HostRange(self.nbytes)
            spare.move_to(self._range)
            self.tensor: Tensor = self._range.tensor(dtype, numel)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    def acquire(self) -> None:
        """Bring the memory back; its contents are undefined."""
        if self.held:
            return
        if self._range is not None:
            self._spare.move_to(self._range)
        else:
            self.tensor.untyped_storage().resize_(self.nbytes)
        self.held = True

    def release(self) -> None:
        """Give the memory back. ``tensor`` must not be read until it is acquired and filled
        again."""
        if not self.held:
            return
        if self._range is not None:
            self._spare.offer(self._range)
        else:
            self.tensor.untyped_storage().resize_(0)
        self.held = False
