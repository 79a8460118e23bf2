"""What parameters show while their values are elsewhere.

A released parameter must keep its shape (summaries, optimizers and ``numel()`` look at it), must
not point at freed memory (a stray read would crash the process), and must not look like data. One
NaN expanded to the shape costs one element, turns a stray read into NaN and most stray writes into
an error; ``zero_`` and ``fill_`` pass silently, so the NaN is looked at before the next gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroexp.errors import ModelError


class Placeholders:
    """Stand-ins for a list of parameters, all over one NaN."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        missing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        self._nan = torch.full((), missing, dtype=dtype, device=device)
        self._views: list[Tensor] = [self._nan.expand(shape) for shape in shapes]

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Point ``params`` at their stand-ins."""
        for param, view in zip(params, self._views, strict=True):
            param.data = view

    def check(self, names: Sequence[str]) -> None:
        """Raise :class:`ModelError` if something wrote into a released parameter.

        Only on the CPU: looking at the value would stall an accelerator at every gather.
        """
        if self._nan.device.type == "cpu" and not math.isnan(self._nan.item()):
            raise ModelError(
                "a parameter of this list was written while its values are sharded, so the write "
                "is lost: "
                f"{', '.join(names)}. Edit parameters inside zeroexp.gathered(parameter, "
                "modify_rank=0)."
            )
