"""What zeroexp's Python costs in a step: everything but collectives, kernels and the model.

One process plays one of two ranks: every message that it sends comes straight back to it, so that
all of the engine's own code runs and nothing is transferred. The units are so small that kernels
take next to nothing; the processor time that a step takes more than forward and backward of the
bare module is the overhead (with the fixed cost of calling each kernel, and of copying the small
messages).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import GPT, MLP
from benchmarks.peer import Peer
from benchmarks.peers import local, zeroexp_engine
from zeroexp.comm.p2p import Op, P2PGroup

NUM_UNITS = 100
STAGES = (0, 1, 2, 3)
ALONE = "module alone"


class Arrived:
    """A transfer that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Loopback:
    """Sends and receives of a rank whose only peer does exactly what it does itself."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Tensor]] = {}
        self._early: dict[int, list[Tensor]] = {}

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Arrived:
        early = self._early.get(tag)
        if early:
            tensor.view(-1).copy_(early.pop(0))
        else:
            self._waiting.setdefault(tag, []).append(tensor)
        return Arrived()

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Arrived:
        waiting = self._waiting.get(tag, [])
        for index, other in enumerate(waiting):
            if other.numel() == tensor.numel():
                waiting.pop(index).view(-1).copy_(tensor.reshape(-1))
                return Arrived()
        # A shard may be offered before its gather; for what a source broadcasts no receive will
        # come: the reflection has it already.
        if tag // P2PGroup.SPACES % len(Op) == Op.ALL_GATHER:
            self._early.setdefault(tag, []).append(tensor.reshape(-1).clone())
        return Arrived()


@contextmanager
def one_of_two_ranks() -> Iterator[None]:
    """A process group of two ranks, this one and its own reflection."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    loopback = Loopback()
    try:
        with (
            mock.patch.object(dist, "isend", loopback.isend),
            mock.patch.object(dist, "irecv", loopback.irecv),
            mock.patch.object(dist, "get_backend", lambda group=None: "gloo"),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _blocks() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(64, (1, 9))
    model = GPT(vocab=64, context=8, dim=16, num_layers=NUM_UNITS, heads=1)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _layers() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return MLP(dim=16, num_layers=NUM_UNITS), (torch.randn(1, 16), torch.randn(1, 16))


MODELS = {"transformer blocks": _blocks, "linear layers": _layers}


def _step_ms(peer: Peer, batch: tuple[Tensor, Tensor], repeat: int) -> float:
    """Median of ``repeat`` steps in milliseconds of processor time."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        peer.backward(*batch)
        peer.update()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) * 1e3


def _measure_model(kind: str, rounds: int, repeat: int) -> list[dict[str, Any]]:
    model, batch = MODELS[kind]()
    num_params = len(list(model.parameters()))
    peers: dict[str, Peer] = {ALONE: local.start(model, {})}
    for stage in STAGES:
        peers[f"stage {stage}"] = zeroexp_engine.start(MODELS[kind]()[0], {"stage": stage})
    for peer in peers.values():
        _step_ms(peer, batch, 3)
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for index in range(rounds):
        for name, peer in list(peers.items())[:: 1 if index % 2 else -1]:
            samples[name].append(_step_ms(peer, batch, repeat))
    return [
        {
            "name": f"{kind}, stage {stage}",
            "what": f"{NUM_UNITS} units, {num_params} parameters, width 16; processor time",
            "unit": "ms",
            "samples": {ALONE: samples[ALONE], "zeroexp": samples[f"stage {stage}"]},
        }
        for stage in STAGES
    ]


def measure(rounds: int, repeat: int = 10) -> dict[str, Any]:
    """One case a model and stage: the bare module and the engine around it, in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases = []
    try:
        for kind in MODELS:
            with one_of_two_ranks():
                cases += _measure_model(kind, rounds, repeat)
    finally:
        torch.set_num_threads(threads)
    return {"num_units": NUM_UNITS, "cases": cases}
