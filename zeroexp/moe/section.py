"""The MoE layers of a part of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroexp.moe.layer import MoE
from zeroexp.zero.companion import Forward


class Layers:
    """See :class:`zeroexp.zero.companion.Section`."""

    def __init__(self, layers: Sequence[MoE]) -> None:
        self._layers = layers

    @property
    def makes_losses(self) -> bool:
        return any(layer.weights.count for layer in self._layers)

    @contextmanager
    def forward(self, kind: Forward) -> Iterator[None]:
        for layer in self._layers:
            layer.forward_is = kind
        try:
            yield
        finally:
            for layer in self._layers:
                layer.forward_is = Forward.WHOLE

    def take_losses(self) -> Tensor | None:
        taken = [layer.take_loss() for layer in self._layers]
        losses = [loss for loss in taken if loss is not None]
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum() if losses else None

    def give_losses(self, total: Tensor) -> None:
        self._layers[0].give_loss(total)
