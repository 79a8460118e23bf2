"""The copy of a segment's values that its optimizer steps, where it does not step the values
themselves: wider than what computes, or on another tier."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp.ops.edits import adopt_edits_in_torch
from zeroexp.zero.disk import DiskState


class MasterCopy:
    """``[num_stepped]`` in ``tensor``, or on ``disk``."""

    def __init__(self, *, tensor: Tensor | None = None, disk: DiskState | None = None) -> None:
        self.tensor = tensor
        self._disk = disk

    def read(self) -> Tensor:
        """The values in memory, only to be read."""
        if self.tensor is not None:
            return self.tensor
        assert self._disk is not None
        return self._disk.read("master")

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace all values."""
        if self.tensor is not None:
            self.tensor.copy_(values)
        else:
            assert self._disk is not None
            self._disk.write("master", values)

    @torch.no_grad()
    def adopt(self, low: Tensor) -> None:
        """Follow edits of ``low`` ``[num_stepped]``, which mirrors the copy; see :func:`adopt`."""
        if self.tensor is not None:
            adopt(self.tensor, low)
            return
        assert self._disk is not None
        for index, (start, stop) in enumerate(self._disk.chunks):
            if adopt(self._disk.open(index)["master"], low[start:stop]):
                self._disk.keep(index)
            else:
                self._disk.drop(index)


def adopt(master: Tensor, low: Tensor) -> bool:
    """Take the master copy from the values that mirror it, where they were edited: an element that
    still is the rounded master keeps its full width. Returns whether anything changed."""
    if master.device.type == "cpu" and master.dtype == torch.float32:
        return ops.adopt_edits(master, low)
    return adopt_edits_in_torch(master, low)
