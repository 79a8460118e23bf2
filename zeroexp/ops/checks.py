"""Argument checks of the ops: a kernel sees addresses, so the rest is settled here, by name."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import Tensor

TYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def check_flat(
    op: str, name: str, tensor: Tensor, dtypes: Collection[torch.dtype], size: int | None = None
) -> None:
    """Raises unless ``tensor`` is a dense CPU tensor of one of ``dtypes`` with ``size`` elements.

    TypeError for dtype, device and layout, ValueError for size and contiguity. Both name the op and
    the argument.
    """
    if (
        tensor.dtype in dtypes
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and (size is None or tensor.numel() == size)
    ):
        return
    allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}, expected {allowed}"
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"{op}: {name} is on {tensor.device}, expected the CPU")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {tensor.layout}, expected a dense tensor")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "is not contiguous"
        )
    raise ValueError(f"{op}: {name} has {tensor.numel()} elements, expected {size}")


def check_apart(op: str, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError when two of the tensors share memory."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
        for name, t in tensors.items()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{op}: {first} and {second} share memory")
