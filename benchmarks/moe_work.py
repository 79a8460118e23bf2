"""The work of the layers that are compared: sizes, weights and batches, the same for every system.

Names end in the dimensions: S tokens of a rank, E experts, C channels, H hidden channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

SEED = 1234
BALANCE_LOSS = 0.01


class Weights(NamedTuple):
    """Of some experts, in their order: ``gelu(x @ up + up_bias) @ down + down_bias``."""

    up_ECH: Tensor
    up_bias_EH: Tensor
    down_EHC: Tensor
    down_bias_EC: Tensor


@dataclass(frozen=True)
class MoeWork:
    """One layer whose experts get ``assignments`` tokens from each rank, each token counted once
    for every expert it chooses. ``capacity`` is the capacity factor, None for a layer that drops
    nothing."""

    experts: int
    top_k: int
    capacity: float | None = None
    assignments: int = 6144
    d_model: int = 256
    hidden: int = 1024

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return self.assignments // self.top_k

    def gate(self) -> Tensor:
        """``[E, C]``, rows of one length: no expert is everybody's first."""
        import torch

        generator = torch.Generator().manual_seed(SEED)
        weight_EC = torch.randn(self.experts, self.d_model, generator=generator)
        return weight_EC / weight_EC.norm(dim=1, keepdim=True)

    def weights(self, experts: range) -> Weights:
        """Those of some experts, the same numbers wherever they lie."""
        import torch

        def one(expert: int) -> list[Tensor]:
            generator = torch.Generator().manual_seed(SEED + 1 + expert)
            shapes = (
                (self.d_model, self.hidden),
                (self.hidden,),
                (self.hidden, self.d_model),
                (self.d_model,),
            )
            return [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes]

        return Weights(*(torch.stack(each) for each in zip(*map(one, experts), strict=True)))

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Input ``[S, C]`` and the gradient of the output, of one rank."""
        import torch

        generator = torch.Generator().manual_seed(SEED - 1 - rank)
        x_SC, direction_SC = torch.randn(2, self.tokens, self.d_model, generator=generator)
        return x_SC, direction_SC


@dataclass
class MoeLayer:
    """A system's layer. ``forward`` makes the output and the loss of the gate, if there is one, in
    training."""

    forward: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    gate: list[nn.Parameter]
    experts: list[nn.Parameter]
