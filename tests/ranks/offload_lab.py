"""Trainings with something special in them, run once without offload and once with each kind.

A case is a function of a :class:`Bench`; it returns tensors (or numbers) by name, on rank 0 at
least. :func:`compare` tells in which of them a kind of offload differs from ``offload=none``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from small import rank, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.engine import Engine

KINDS = ("cpu", "nvme", "cpu_params", "nvme_params")
CHUNK = 2**16

Found = dict[str, Any]


TIERS = {
    "none": ("device", "device"),
    "cpu": ("cpu", "device"),
    "nvme": ("nvme", "device"),
    "cpu_params": ("cpu", "cpu"),
    "nvme_params": ("nvme", "nvme"),
}
"""Kind to the tiers of optimizer state and parameters."""

_OF_THE_STEP = ("offload_chunk", "offload_fraction", "offload_step_in_backward")


def offloaded(stage: int, folder: str, **keys: Any) -> dict[str, Any]:
    """``small.settings`` with small chunks and swap files in ``folder``, without those keys that
    would have no effect (which is an error)."""
    optim, params = TIERS[keys.get("offload_kind", "none")]
    tiers = (keys.get("offload_optim", optim), keys.get("offload_params", params))
    keys = {"nvme_dir": folder, "offload_chunk": CHUNK, "timeout": 20, **keys}
    if "nvme" not in tiers:
        keys = {k: v for k, v in keys.items() if not k.startswith("nvme_")}
    if tiers[0] == "device":
        keys = {k: v for k, v in keys.items() if k not in _OF_THE_STEP}
    return settings(stage, **keys)


class Bench:
    """Builds engines of one stage and one placement; ``keys`` are those of ``small.settings``."""

    def __init__(self, stage: int, folder: str, **keys: Any) -> None:
        self.stage, self.folder, self.keys = stage, folder, keys

    def settings(self, **keys: Any) -> dict[str, Any]:
        return offloaded(self.stage, self.folder, **{**self.keys, **keys})

    def engine(
        self,
        module: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        **keys: Any,
    ) -> Engine:
        return Engine(module, optimizers, self.settings(**keys))


def part(t: Tensor) -> Tensor:
    """This rank's rows of a global batch."""
    return t.chunk(world())[rank()]


def train(engine: Engine, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Mean squared errors of this rank, one step per batch."""
    losses = []
    for x, y in data:
        loss = F.mse_loss(engine(part(x)).float(), part(y))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def leaves(engine: Engine) -> Found:
    """Weights, and the state of each optimizer, as they are now (collective)."""
    found: Found = dict(engine.state_dict())
    for number, optimizer in enumerate(engine.optimizers):
        state = engine.optimizer_state_dict(optimizer)
        for index, entry in state.get("state", {}).items():
            found |= {f"{number}.{index}.{key}": value for key, value in entry.items()}
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same bits (any NaN is like any other)."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and torch.equal(a.nan_to_num(math.pi), b.nan_to_num(math.pi))
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def run(module: str, name: str, stage: int, folder: str, keys: dict[str, Any]) -> Found:
    """One case on the ranks."""
    case: Callable[[Bench], Found] = getattr(importlib.import_module(module), name)
    torch.manual_seed(0)
    return case(Bench(stage, folder, **keys))


def differences(
    module: str, name: str, stage: int, folder: str, variants: Sequence[dict[str, Any]]
) -> dict[str, list[str]]:
    """Per variant (keys beside ``offload=none``), what differs on this rank."""
    wanted = run(module, name, stage, folder, {"offload_kind": "none"})
    out = {}
    for keys in variants:
        found = run(module, name, stage, folder, keys)
        apart = [n for n in wanted.keys() | found.keys() if not _equal(wanted, found, n)]
        out[repr(keys)] = sorted(apart)
    out["checked"] = sorted(wanted)
    return out


def _equal(a: Found, b: Found, name: str) -> bool:
    return name in a and name in b and same(a[name], b[name])


def compare(
    ranks: Any,
    num_ranks: int,
    case: Callable[[Bench], Found],
    stage: int,
    folder: Any,
    variants: Sequence[dict[str, Any]] = tuple({"offload_kind": kind} for kind in KINDS),
) -> None:
    """Assert that every variant leaves what ``offload=none`` leaves."""
    results = ranks(num_ranks)(
        differences, case.__module__, case.__name__, stage, str(folder), list(variants), timeout=120
    )
    assert results[0]["checked"], f"{case.__name__} returned nothing"
    for number, found in enumerate(results):
        wrong = {keys: names for keys, names in found.items() if names and keys != "checked"}
        assert not wrong, f"{case.__name__} at stage {stage}, rank {number}: {wrong}"
