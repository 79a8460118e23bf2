"""What a parameter shows while its values are elsewhere.

A released parameter must keep its shape (summaries, optimizers and ``numel()`` look at it), must not point at freed
memory (a stray read would crash the process), and must not look like data. A one-element NaN expanded to the shape costs
one element, turns a stray read into NaN and most stray writes into an error; ``zero_`` and ``fill_`` pass silently, so
the value is checked before the next gather.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroexp.errors import ModelError


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` that takes one element of memory and reads as NaN."""
    return torch.full((1,), float("nan"), dtype=dtype, device=device).expand(shape)


def check_untouched(name: str, param: nn.Parameter) -> None:
    """Raise :class:`ModelError` if something wrote into ``param`` while it was released."""
    if param.numel() and param.stride() == (0,) * param.dim() and param.dim():
        value = param.data.flatten()[0] if param.numel() == 1 else param.data.as_strided((1,), (1,))[0]
        if not torch.isnan(value):
            raise ModelError(
                f"parameter {name} was written while its values are sharded, so the write is lost. Edit it inside "
                f"zeroexp.gathered(parameter, modify_rank=0)."
            )
