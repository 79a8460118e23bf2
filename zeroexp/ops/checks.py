"""Argument checks of the ops: a kernel sees addresses, so the rest is settled here, by name."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

TYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
_STATE_TYPES = (torch.float32,)
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What gradients, parameters and copies may be."""


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


def check_step(
    op: str, p: Tensor, g: Tensor, state: Mapping[str, Tensor], copy_out: Tensor | None
) -> int:
    """The number of elements of an optimizer step; raises unless its tensors go together.

    ``p`` and ``state`` (by argument name) are fp32, ``g`` and ``copy_out`` fp32, bf16 or fp16; all
    have the size of ``p`` and memory of their own. TypeError and ValueError as in
    :func:`check_flat` and :func:`check_apart`.
    """
    size = p.numel()
    check_flat(op, "p", p, _STATE_TYPES)
    tensors = {"p": p}
    for name, tensor in state.items():
        check_flat(op, name, tensor, _STATE_TYPES, size)
        tensors[name] = tensor
    check_flat(op, "g", g, FLOAT_TYPES, size)
    tensors["g"] = g
    if copy_out is not None:
        check_flat(op, "copy_out", copy_out, FLOAT_TYPES, size)
        tensors["copy_out"] = copy_out
    check_apart(op, tensors)
    return size
