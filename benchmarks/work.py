"""The work that is compared: which model, which batches, which optimizer settings. Same seeds for
every mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

SEED = 1234
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Work:
    """One model and its batches; torch is imported only when one of the methods is called.

    ``num_params`` is written down, not counted, so that a table needs no torch; the tests count it.
    ``micro_batch`` is in samples per rank, ``num_blocks`` is how many units a system that shards by
    layer makes beside the root.
    """

    name: str
    title: str
    num_params: int
    num_blocks: int
    micro_batch: int
    build: Callable[[], nn.Module]
    sample: Callable[[int, int], tuple[Tensor, Tensor]]

    def model(self) -> nn.Module:
        """The float32 module with the same initial values in every process."""
        import torch

        torch.manual_seed(SEED)
        return self.build()

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank's micro-batch; each (rank, step) has its own values."""
        return self.sample(rank, step)


def _gpt(
    name: str,
    title: str,
    num_params: int,
    *,
    vocab: int,
    context: int,
    dim: int,
    layers: int,
    heads: int,
    micro_batch: int,
    length: int,
) -> Work:
    def build() -> nn.Module:
        from benchmarks.models import GPT

        return GPT(vocab, context, dim, layers, heads)

    def sample(rank: int, step: int) -> tuple[Tensor, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(SEED + 100_003 * step + rank)
        tokens = torch.randint(vocab, (micro_batch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Work(name, title, num_params, layers, micro_batch, build, sample)


def _mlp(name: str, title: str, num_params: int, *, dim: int, layers: int) -> Work:
    def build() -> nn.Module:
        from benchmarks.models import MLP

        return MLP(dim, layers)

    def sample(rank: int, step: int) -> tuple[Tensor, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(SEED + 100_003 * step + rank)
        x, y = torch.randn(2, 1, dim, generator=generator)
        return x, y

    return Work(name, title, num_params, layers, 1, build, sample)


WORKS: Mapping[str, Work] = MappingProxyType(
    {
        work.name: work
        for work in (
            _gpt(
                "gpt10",
                "GPT, 6 layers of 320, vocabulary 4096; micro-batch 4 x 128",
                10_101_760,
                vocab=4096,
                context=256,
                dim=320,
                layers=6,
                heads=5,
                micro_batch=4,
                length=128,
            ),
            _mlp("mlp", "MLP, 8 layers of 2048 x 2048; batch 1", 33_554_432, dim=2048, layers=8),
            _gpt(
                "gpt125",
                "GPT, 12 layers of 768, vocabulary 25600; micro-batch 1 x 128",
                124_574_208,
                vocab=25_600,
                context=256,
                dim=768,
                layers=12,
                heads=12,
                micro_batch=1,
                length=128,
            ),
            _gpt(
                "gpt-tiny",
                "GPT, 2 layers of 64, vocabulary 256; micro-batch 2 x 32 (smoke runs)",
                136_960,
                vocab=256,
                context=64,
                dim=64,
                layers=2,
                heads=4,
                micro_batch=2,
                length=32,
            ),
            _mlp(
                "mlp-tiny",
                "MLP, 4 layers of 128 x 128; batch 1 (smoke runs)",
                65_536,
                dim=128,
                layers=4,
            ),
        )
    }
)
