"""Barriers, objects and logged numbers travel in a gloo group of their own.

Lightning asks its strategy for small collectives all the time: paths, flags, metrics. In the
    engine's group they
would queue behind gathers and reductions that are still under way, and on an accelerator they
would touch the compute stream.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.errors import CollectiveTimeout

T = TypeVar("T")

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _operation(op: Any) -> tuple[Any, bool]:
    """The torch operation for Lightning's name of it, and whether to divide by the ranks."""
    if op is None:
        return dist.ReduceOp.SUM, False
    if isinstance(op, str):
        name = op.lower()
        if name not in _OPS:
            known = ", ".join(_OPS)
            raise ValueError(f"unknown reduce operation {op!r}; known are {known}")
        return _OPS[name], name in ("mean", "avg")
    if op == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, True
    return op, False


class PendingSum:
    """A sum over the ranks that is under way."""

    def __init__(self, value: Tensor, work: Any) -> None:
        self._value, self._work = value, work

    def result(self) -> int:
        """The sum; waits for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._value)


class SideGroup:
    """Small collectives over all ranks; every one is the identity where there is one process.

    Args:
        timeout: seconds a collective waits for the slowest rank. Meeting it raises
            :class:`~zeroexp.errors.CollectiveTimeout`, which names the operation.

    Making one is a collective where a process group exists: every rank has to.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=limit) if self.size > 1 else None

    def _run(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            text = str(error)
            late = "imed out" in text or "imeout" in text or "failed to pass monitored" in text
            if not late:
                raise
            raise CollectiveTimeout(
                f"rank {self.rank}: {what} met its deadline of {self.timeout:g} s: {text}"
            ) from error

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank. At the deadline rank 0's error names those that are missing."""
        if self.size == 1:
            return
        limit = datetime.timedelta(seconds=self.timeout)
        self._run(
            f"barrier {name!r}" if name else "a barrier",
            lambda: dist.monitored_barrier(self._group, timeout=limit, wait_all_ranks=True),
        )

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank ``src`` (pickled; tensors arrive on their own device type)."""
        if self.size == 1:
            return obj
        box = [obj]
        self._run(
            f"broadcast of a {type(obj).__name__}",
            lambda: dist.broadcast_object_list(
                box, src, group=self._group, device=torch.device("cpu")
            ),
        )
        return box[0]

    def reduce(self, tensor: Tensor, group: Any = None, op: Any = "mean") -> Tensor:
        """The tensor reduced over all ranks (or over ``group``), a new tensor on the same device.

        ``op``: sum, mean (or avg), min, max, product, or a ``ReduceOp``. The mean of integers is
        rounded towards zero. No barrier goes before it.
        """
        if self.size == 1:
            return tensor
        operation, divide = _operation(op)
        over = self._group if group is None or group is dist.group.WORLD else group
        size = dist.get_world_size(over)
        result = tensor.detach().to("cpu", copy=True) if over is self._group else tensor.clone()
        as_bool = result.dtype is torch.bool
        if result.is_floating_point() and over is self._group:
            # gloo ends the process when ranks bring different widths, and losses do.
            result = result.double()
        result = result.to(torch.uint8) if as_bool else result.contiguous()
        self._run("a reduction", lambda: dist.all_reduce(result, op=operation, group=over))
        if divide:
            result = (
                result.div_(size)
                if torch.is_floating_point(result) or torch.is_complex(result)
                else torch.div(result, size, rounding_mode="trunc")
            )
        return (result.bool() if as_bool else result).to(tensor.device, tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, ``(ranks, *tensor.shape)``; at one rank the tensor itself.

        With ``sync_grads`` the result is differentiable.
        """
        if self.size == 1:
            return tensor
        from torch.distributed.nn.functional import all_gather

        world = group is None or group is dist.group.WORLD
        over = (
            (self._group if tensor.device.type == "cpu" else dist.group.WORLD) if world else group
        )
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            parts = self._run("a gather", lambda: all_gather(tensor.contiguous(), over))
        return torch.stack(list(parts))

    def agree(self, decision: bool, every: bool) -> bool:
        """True where every rank (or, with ``every=False``, any rank) says so."""
        if self.size == 1:
            return decision
        votes = self.reduce(torch.tensor(int(decision)), op="sum")
        return bool(votes == self.size) if every else bool(votes > 0)

    def extremes(self, numbers: Sequence[float]) -> tuple[list[float], list[float]]:
        """The smallest and the largest of each number over all ranks (infinities included)."""
        mine = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.float64)
        both = self.reduce(mine, op="min").tolist()
        count = len(numbers)
        return both[:count], [-n for n in both[count:]]

    def start_sum(self, number: int) -> PendingSum:
        """Begin to sum ``number`` over all ranks; the result is asked for later."""
        value = torch.tensor(number)
        if self.size == 1:
            return PendingSum(value, None)
        return PendingSum(value, dist.all_reduce(value, group=self._group, async_op=True))
