"""One rank of one system's MoE layer.

    python -m benchmarks.moe_worker MODULE RANK WORLD_SIZE STORE_FILE FOLDER REPLY_FD

MODULE has ``build(work)``, which returns a :class:`benchmarks.moe_work.MoeLayer`. Commands come and
replies go as :mod:`benchmarks.rank` says.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe_work import MoeLayer, MoeWork
from benchmarks.rank import join, serve, versions


def _squares(tensors: Iterable[Tensor | None]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors if t is not None)


class MoeWorker:
    """Keeps the layer of the last command."""

    def __init__(self, module: str, rank: int) -> None:
        self.build = importlib.import_module(module).build
        self.rank = rank
        self.work: MoeWork | None = None
        self.layer: MoeLayer | None = None

    def passes(self, work: dict[str, Any], count: int) -> dict[str, Any]:
        """Seconds of each of ``count`` forward and backward passes, after one that is not timed,
        and marks of what they computed: tokens with an output, and the sums of squares of the
        output and of the gradients of input, gate and experts."""
        wanted = MoeWork(**work)
        if self.layer is None or self.work != wanted:
            self.layer = None  # its memory goes before that of the next one comes
            self.work, self.layer = wanted, self.build(wanted)
        layer = self.layer
        x, direction = wanted.batch(self.rank)
        x.requires_grad_()
        parameters = [*layer.gate, *layer.experts]
        seconds = []
        for index in range(1 + count):
            for tensor in (x, *parameters):
                tensor.grad = None
            dist.barrier()
            begin = time.perf_counter()
            y, loss = layer.forward(x)
            if loss is None:
                y.backward(direction)
            else:
                torch.autograd.backward([y, loss], [direction, torch.ones_like(loss)])
            if index:
                seconds.append(time.perf_counter() - begin)
        return {
            "seconds": seconds,
            "marks": [
                int(y.detach().any(dim=1).sum()),
                _squares([y.detach()]),
                _squares([x.grad]),
                _squares(p.grad for p in layer.gate),
                _squares(p.grad for p in layer.experts),
            ],
            "versions": versions(),
        }

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out the one command there is."""
        return self.passes(command["work"], command["count"])


def main(argv: list[str]) -> None:
    module, rank, world, store, _, reply_fd = argv
    join(int(rank), int(world), store)
    serve(int(reply_fd), MoeWorker(module, int(rank)).answer)


if __name__ == "__main__":
    main(sys.argv[1:])
