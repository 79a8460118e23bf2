"""An all-to-all that autograd can differentiate and that other work may run beside.

The transpose of "row i goes to rank r" is "its gradient comes back", so the backward of an
all-to-all is the all-to-all with the counts exchanged. Each direction has a start and an end of its
own: what is computed between them in forward is computed between them in backward too, because
autograd runs the nodes in the reverse of their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroexp.comm.group import DONE, Group, Pending, row_bytes


class AllToAll:
    """One exchange of rows ``[sum(sent), ...]`` against rows ``[sum(received), ...]``.

    ``tag`` names the transfer of the forward pass, ``tag + 1`` that of the backward pass.
    ``done`` is called after each with the bytes sent and the seconds for which the host waited.
    """

    def __init__(
        self,
        group: Group,
        *,
        received: Sequence[int],
        sent: Sequence[int],
        tag: int,
        what: str,
        done: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        self._group = group
        self._received, self._sent = list(received), list(sent)
        self._tag, self._what = tag, what
        self._done = done
        self._out: Tensor | None = None  # on its way in the forward pass
        self._forward: Pending = DONE
        self._backward: Pending = DONE
        self._nbytes = self._nbytes_back = 0

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send ``rows``; what is returned stands for them until :meth:`end` takes it."""
        started: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return started

    def end(self, started: Tensor) -> Tensor:
        """The rows that arrived, by the index of their origin. Raises
        :class:`zeroexp.errors.CollectiveTimeout`."""
        arrived: Tensor = _End.apply(started, self)  # type: ignore[no-untyped-call]
        return arrived

    def send(self, rows: Tensor) -> None:
        self._nbytes = self._leaving(self._sent, rows)
        self._out, self._forward = self._begin(
            rows, self._received, self._sent, self._tag, self._what
        )

    def wait(self) -> Tensor:
        pending, self._forward = self._forward, DONE
        out, self._out = self._out, None
        if out is None:
            raise RuntimeError(f"{self._what}: ended without a start")
        self._timed(pending, self._nbytes)
        return out

    def send_back(self, rows: Tensor) -> Tensor:
        self._nbytes_back = self._leaving(self._received, rows)
        what = f"{self._what}, backward"
        out, self._backward = self._begin(rows, self._sent, self._received, self._tag + 1, what)
        if torch.is_anomaly_enabled():  # looks into gradients at once, also those on their way
            self.wait_back()
        return out

    def wait_back(self) -> None:
        pending, self._backward = self._backward, DONE
        if pending is not DONE:
            self._timed(pending, self._nbytes_back)

    def _begin(
        self, rows: Tensor, received: Sequence[int], sent: Sequence[int], tag: int, what: str
    ) -> tuple[Tensor, Pending]:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        pending = self._group.all_to_all(
            out, rows.contiguous(), received=received, sent=sent, tag=tag, what=what
        )
        return out, pending

    def _leaving(self, sent: Sequence[int], rows: Tensor) -> int:
        return (sum(sent) - sent[self._group.index]) * row_bytes(rows)

    def _timed(self, pending: Pending, nbytes: int) -> None:
        begin = time.perf_counter()
        pending.wait()
        self._done(nbytes, time.perf_counter() - begin)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.send(rows)
        return rows.view_as(rows)  # of the shape that the gradient will have

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.wait_back()
        return grad, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: AllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.send_back(grad), None
