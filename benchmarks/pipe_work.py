"""The work of the pipelines that are compared: model, cut and batches, the same for every system.

Names end in the dimensions: N samples of a micro-batch, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.models import GPT

SEED = 1234


class Batch(NamedTuple):
    """Micro-batches: tokens (N, L) and targets (N, L) of each, int64."""

    inputs: list[Tensor]
    targets: list[Tensor]


@dataclass(frozen=True)
class PipeWork:
    """A GPT in ``stages`` equal runs of its layers: embedding, blocks, and norm with head. The
    default sizes are those of gpt10 in :mod:`benchmarks.work`."""

    vocab: int = 4096
    context: int = 256
    dim: int = 320
    layers: int = 6
    heads: int = 5
    micro_batches: int = 8
    samples: int = 2
    length: int = 128
    stages: int = 2

    def model(self) -> GPT:
        """The float32 module with the same initial values in every process."""
        import torch

        from benchmarks.models import GPT

        torch.manual_seed(SEED)
        return GPT(self.vocab, self.context, self.dim, self.layers, self.heads)

    def part(self, layers: Sequence[tuple[str, nn.Module]], stage: int) -> nn.Sequential:
        """The layers of one stage."""
        from torch import nn

        each = len(layers) // self.stages
        return nn.Sequential(*(layer for _, layer in layers[stage * each : (stage + 1) * each]))

    def batch(self, step: int) -> Batch:
        """That of one step, the same on every rank of the pipe."""
        import torch

        generator = torch.Generator().manual_seed(SEED + 100_003 * step)
        shape = (self.micro_batches, self.samples, self.length + 1)
        tokens_MNL = torch.randint(self.vocab, shape, generator=generator)
        return Batch(
            [tokens_NL[:, :-1].contiguous() for tokens_NL in tokens_MNL],
            [tokens_NL[:, 1:].contiguous() for tokens_NL in tokens_MNL],
        )


class PipePeer(Protocol):
    """A system that trains its part of the model; one step is ``passes`` and then ``update``."""

    def passes(self, batch: Batch) -> float | None:
        """Forward and backward of every micro-batch; the mean loss where this rank knows it."""

    def update(self) -> None:
        """The optimizer's step; gradients are cleared."""
