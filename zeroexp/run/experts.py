"""What the experts of a run did between two rows: loads, drops, balance, losses, all-to-all."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from zeroexp.comm import Group
from zeroexp.moe import moe_layers, read_statistics
from zeroexp.moe.statistics import Statistics


class ExpertUse:
    """Reads the MoE layers of ``module``. Training passes only: evaluation is set aside."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers = moe_layers(module)
        self._training: dict[str, Statistics] = {}

    def evaluation_starts(self) -> None:
        for path, layer in self._layers.items():
            self._training[path] = layer.statistics
            layer.statistics = Statistics(layer.num_experts)

    def evaluation_ends(self) -> None:
        for path, statistics in self._training.items():
            self._layers[path].statistics = statistics
        self._training.clear()

    def figures(self, *groups: Group) -> dict[str, dict[str, Any]] | None:
        """By layer, over the ranks of ``groups`` and since the last call (collective); None without
        experts."""
        if not self._layers:
            return None
        found = read_statistics(self._module, *groups)
        return {path: asdict(numbers) for path, numbers in found.items()}
