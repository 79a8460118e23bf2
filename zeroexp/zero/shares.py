"""Which tensors of a module have other values on other ranks: the module that brings them says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from zeroexp.layout import Share


@runtime_checkable
class Spread(Protocol):
    """A module whose parameters and buffers may lie on several data-parallel ranks."""

    def zeroexp_share(self, name: str) -> Share | None:
        """Which share this rank has of the parameter or buffer called ``name`` below the module;
        None: all of it."""
        ...


def shares_of(model: nn.Module) -> dict[int, Share]:
    """``id`` of every parameter and buffer of ``model`` of which this rank has a share."""
    found: dict[int, Share] = {}
    for module in model.modules():
        if isinstance(module, Spread):
            for name, tensor in raw_tensors(module):
                share = module.zeroexp_share(name)
                if share is not None and share.count > 1:
                    found[id(tensor)] = share
    return found


def raw_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``module.named_parameters(remove_duplicate=False)`` without making anything whole."""
    for name, tensor in raw_tensors(module):
        if isinstance(tensor, nn.Parameter):
            yield name, tensor


def raw_tensors(module: nn.Module, *, saved: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, a shared one under each of its names, without making anything
    whole; ``saved``: those in ``module.state_dict()``, in its order."""
    for path, sub in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, param in dict.items(sub._parameters):
            if param is not None:
                yield prefix + name, param
        left_out = sub._non_persistent_buffers_set if saved else ()
        for name, buffer in sub._buffers.items():
            if buffer is not None and name not in left_out:
                yield prefix + name, buffer
