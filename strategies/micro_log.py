"""What the steps of micro-batches log: one number per name, as of the whole batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroexp.errors import ModelError

_TOLD = {
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "sync_dist", "batch_size"),
    *("add_dataloader_idx", "rank_zero_only"),
}
"""What of the arguments of ``self.log`` the other ranks are told."""

_NAMES: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}
_COMBINE: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
}
"""How the numbers of micro-batches become that of their batch, where it is no mean."""

Logged = dict[str, tuple[float, dict[str, Any]]]
"""By name the number and the other arguments of ``self.log``; JSON can hold it."""


class MicroLog:
    """Stands in for ``module.log`` while steps run, and says afterwards what they logged."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._signature = inspect.signature(module.log)
        self._entries: list[tuple[str, Any, dict[str, Any]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, nothing reaches Lightning. What was recorded before is forgotten."""
        self._entries = []
        self._module.__dict__["log"] = self._record
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What is logged inside counts for nothing."""
        count = len(self._entries)
        try:
            yield
        finally:
            del self._entries[count:]

    def _record(self, *args: Any, **kwargs: Any) -> None:
        given = self._signature.bind(*args, **kwargs).arguments
        name, value = given.pop("name"), given.pop("value")
        if not isinstance(value, (int, float, Tensor)) or (
            isinstance(value, Tensor) and value.numel() != 1
        ):
            raise ModelError(
                f"self.log({name!r}, ...) of a {type(value).__name__}: in a pipeline only the last "
                "stage has it, and only numbers can be brought to the other ranks. Log its value"
            )
        defaults = self._signature.parameters
        asked = {key: what for key, what in given.items() if what is not defaults[key].default}
        reduction = asked.get("reduce_fx")
        if callable(reduction):
            asked["reduce_fx"] = _NAMES.get(reduction, reduction)
        for key, what in asked.items():
            if key not in _TOLD or callable(what):
                raise ModelError(f"self.log({name!r}, {key}=...) does not work in a pipeline")
        self._entries.append((name, value.detach() if isinstance(value, Tensor) else value, asked))

    def of_batch(self, weights: Sequence[float]) -> Logged:
        """What was logged, with the ``weights`` of the micro-batches in their mean."""
        by_name: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for name, value, asked in self._entries:
            by_name.setdefault(name, []).append((float(value), asked))
        found: Logged = {}
        for name, entries in by_name.items():
            values, asked = [value for value, _ in entries], dict(entries[-1][1])
            combine = _COMBINE.get(asked.get("reduce_fx", "mean"))
            if asked.get("batch_size") is not None:  # of a micro-batch
                asked["batch_size"] = sum(int(each["batch_size"]) for _, each in entries)
            found[name] = (combine(values) if combine else mean(values, weights), asked)
        return found

    def tell(self, logged: Mapping[str, Sequence[Any]], ranks: int) -> None:
        """Log ``logged`` (of some rank's :meth:`of_batch`) on this one of ``ranks`` that do."""
        for name, (value, asked) in logged.items():
            if asked.get("sync_dist") and asked.get("reduce_fx") == "sum":
                value = value / ranks  # Lightning adds up over all ranks: once for all of these
            self._module.log(name, value, **asked)


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; the plain one of values that are not one per micro-batch."""
    if len(values) != len(weights):
        weights = [1.0] * len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)
