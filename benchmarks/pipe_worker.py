"""One rank of one system's pipeline.

    python -m benchmarks.pipe_worker MODULE RANK WORLD_SIZE STORE_FILE FOLDER REPLY_FD

MODULE has ``start(work, options)``, which returns a :class:`benchmarks.pipe_work.PipePeer`.
Commands come and replies go as :mod:`benchmarks.rank` says.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models import next_token_loss
from benchmarks.pipe_work import Batch, PipePeer, PipeWork
from benchmarks.rank import join, serve, versions


class PipeWorker:
    """Keeps the system that the first command starts."""

    def __init__(self, module: str, rank: int) -> None:
        self._start = importlib.import_module(module).start
        self._rank = rank
        self._step = 0
        self.work = PipeWork()
        self.peer: PipePeer

    def start(self, work: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        self.work = PipeWork(**work)
        self.peer = self._start(self.work, options)
        return versions()

    def _batch(self) -> Batch:
        self._step += 1
        return self.work.batch(self._step - 1)

    def passes(self, count: int) -> dict[str, Any]:
        """Wall and processor seconds of forward and backward of ``count`` batches, each from a
        barrier; the steps between are not timed."""
        seconds, cpu_seconds, losses = [], [], []
        for _ in range(count):
            batch = self._batch()
            dist.barrier()
            cpu, begin = time.process_time(), time.monotonic()
            losses.append(self.peer.passes(batch))
            seconds.append(time.monotonic() - begin)
            cpu_seconds.append(time.process_time() - cpu)
            self.peer.update()
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of ``count`` whole steps without pause, each from the end of the one before."""
        batches = [self._batch() for _ in range(count)]
        losses = []
        dist.barrier()
        ends = [time.monotonic()]
        for batch in batches:
            losses.append(self.peer.passes(batch))
            self.peer.update()
            ends.append(time.monotonic())
        return {"seconds": [b - a for a, b in itertools.pairwise(ends)], "losses": losses}

    def alone(self, count: int) -> dict[str, Any]:
        """Processor seconds of this rank's part of ``count`` batches by a plain loop: the modules'
        forward and backward, on inputs and gradients that are simply there."""
        layers = self.work.model().pipeline_layers()
        stage = self.work.part(layers, self._rank)
        x_NLD, grad_NLD = torch.randn(2, self.work.samples, self.work.length, self.work.dim)
        batch = self._batch()
        is_first, is_last = self._rank == 0, self._rank == self.work.stages - 1
        cpu_seconds = []
        for _ in range(count):
            stage.zero_grad(set_to_none=True)
            cpu = time.process_time()
            for inputs, targets in zip(*batch, strict=True):
                output = stage(inputs if is_first else x_NLD.detach().requires_grad_())
                if is_last:
                    torch.autograd.backward(next_token_loss(output, targets))
                else:
                    torch.autograd.backward(output, grad_NLD)
            cpu_seconds.append(time.process_time() - cpu)
        return {"cpu_seconds": cpu_seconds}

    def stamps(self, count: int) -> dict[str, Any]:
        """When each action of ``count`` batches ran (zeroexp only), each from a barrier."""
        found = []
        for _ in range(count):
            batch = self._batch()
            dist.barrier()
            begin = time.monotonic()
            stamps = self.peer.stamps(batch)  # type: ignore[attr-defined]
            found.append({"begin": begin, "end": time.monotonic(), "stamps": stamps})
            self.peer.update()
        return {"batches": found}

    def costs(self, repeats: int) -> dict[str, Any]:
        """Seconds of each layer's forward and backward, as the planner measures them: all ranks at
        once, each layer apart; and of the loss."""
        from zeroexp.pipeline.runtime.measure import layer_costs

        batch = self._batch()
        layers = [*self.work.model().pipeline_layers(), ("loss", _Loss(batch.targets[0]))]
        found = layer_costs(layers, batch.inputs[0], repeats=repeats)
        return {"layers": [[c.forward, c.input_grad + c.weight_grad] for c in found]}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command of the harness; the names are those in ``do``."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start,
            "passes": self.passes,
            "steps": self.steps,
            "alone": self.alone,
            "stamps": self.stamps,
            "costs": self.costs,
        }
        return actions[command.pop("do")](**command)


class _Loss(nn.Module):
    def __init__(self, targets_NL: torch.Tensor) -> None:
        super().__init__()
        self.targets_NL = targets_NL

    def forward(self, logits_NLV: torch.Tensor) -> torch.Tensor:
        return next_token_loss(logits_NLV, self.targets_NL)


def main(argv: list[str]) -> None:
    module, rank, world, store, _, reply_fd = argv
    join(int(rank), int(world), store)
    serve(int(reply_fd), PipeWorker(module, int(rank)).answer)


if __name__ == "__main__":
    main(sys.argv[1:])
