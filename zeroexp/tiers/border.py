"""The border between the device's memory and the host's, and how tensors cross it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zeroexp.comm.pool import flat_zeros


class Crossing(ABC):
    """A tensor on its way across."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The tensor on the other side. On the host its values are there when this returns; on the
        device work that is enqueued from now on sees them."""


class Border(ABC):
    """Two kinds of memory: the device's, and the host's where the CPU works."""

    divides = True
    """Whether they are not the same."""

    @abstractmethod
    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor ``[numel]`` of zeros in host memory that the device reaches directly."""

    @abstractmethod
    def up(self, host: Tensor) -> Crossing:
        """Start to bring ``host`` to the device; it must not change before :meth:`Crossing.wait`
        and all work on what that gave are over."""

    @abstractmethod
    def down(self, device: Tensor, into: Tensor | None = None) -> Crossing:
        """Start to bring ``device`` to the host, into ``into`` if it is given."""

    @abstractmethod
    def host_like(self, device: Tensor) -> Tensor:
        """Host memory for new values of ``device``, its own where it is there; :meth:`upload`
        brings them."""

    @abstractmethod
    def upload(self, host: Tensor, device: Tensor) -> None:
        """What was made in :meth:`host_like` of ``device`` is there for work enqueued from now
        on."""


class _Here(Crossing):
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class OneMemory(Border):
    """The device is the CPU: everything is on both sides."""

    divides = False

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return flat_zeros(numel, dtype, torch.device("cpu"))

    def up(self, host: Tensor) -> Crossing:
        return _Here(host)

    def down(self, device: Tensor, into: Tensor | None = None) -> Crossing:
        if into is None:
            return _Here(device)
        into.copy_(device)
        return _Here(into)

    def host_like(self, device: Tensor) -> Tensor:
        return device

    def upload(self, host: Tensor, device: Tensor) -> None:
        pass


class _Copied(Crossing):
    def __init__(self, tensor: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        self._tensor = tensor
        self._source: Tensor | None = source  # must not be freed before it was read
        self._event = event

    def wait(self) -> Tensor:
        if self._tensor.is_cuda:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        else:
            self._event.synchronize()
        self._source = None
        return self._tensor


class TwoMemories(Border):
    """A CUDA device: pinned host memory, copies on a stream of their own, events between it and the
    stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def up(self, host: Tensor) -> Crossing:
        return self._copy(host, torch.empty_like(host, device=self._device))

    def down(self, device: Tensor, into: Tensor | None = None) -> Crossing:
        if into is None:
            into = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
        return self._copy(device, into)

    def _copy(self, source: Tensor, target: Tensor) -> Crossing:
        # What the device has been told so far makes the source, or still reads the target's memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return _Copied(target, source, event)

    def host_like(self, device: Tensor) -> Tensor:
        return torch.empty(device.shape, dtype=device.dtype, pin_memory=True)

    def upload(self, host: Tensor, device: Tensor) -> None:
        self._copy(host, device).wait()


def border_of(device: torch.device) -> Border:
    """The border of ``device``."""
    return TwoMemories(device) if device.type == "cuda" else OneMemory()
