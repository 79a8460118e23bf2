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
        self._with_losses = [layer for layer in layers if layer.weights.count]

    @property
    def num_losses(self) -> int:
        return len(self._with_losses)

    @property
    def meets_others(self) -> bool:
        return any(layer.expert_parallel > 1 for layer in self._layers)

    @property
    def draws_apart(self) -> bool:
        return any(layer.draws_random and layer.gate.draws.source for layer in self._layers)

    @contextmanager
    def forward(self, kind: Forward) -> Iterator[None]:
        drawn = []
        if kind is Forward.TRIAL:
            sources = {id(s): s for layer in self._layers if (s := layer.gate.draws.source)}
            drawn = [(source, source.get_state()) for source in sources.values()]
        for layer in self._layers:
            layer.forward_is = kind
        try:
            yield
        finally:
            for layer in self._layers:
                layer.forward_is = Forward.WHOLE
            for source, state in drawn:
                source.set_state(state)

    def take_losses(self) -> Tensor | None:
        taken = [layer.take_loss() for layer in self._with_losses]
        first = next((loss for loss in taken if loss is not None), None)
        if first is None:
            return None
        return torch.stack([first.new_zeros(()) if x is None else x.to(first) for x in taken])

    def give_losses(self, losses: Tensor) -> None:
        for layer, loss in zip(self._with_losses, losses.unbind(), strict=True):
            layer.give_loss(loss)

    def forget(self) -> None:
        for layer in self._layers:
            layer.take_loss()
            if layer.gate.bias is not None:
                layer.gate.bias.load = None
