"""What MoE layers need from the engine that trains them."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from zeroexp.comm import Group
from zeroexp.moe.bias import update_biases
from zeroexp.moe.model import experts_left_out, name_layers


class ExpertCompanion:
    """See :class:`zeroexp.zero.companion.Companion`: numbers the layers of ``model``, finds experts
    that nothing steps, and moves the biases that balance the load."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        name_layers(model)

    def warnings(self, stepped: Container[int]) -> list[str]:
        names = experts_left_out(self._model, stepped)
        if not names:
            return []
        return [
            f"no optimizer holds {names[0]} ({len(names)} parameters of experts): they will never "
            "be stepped. Build the optimizer after the experts, or freeze them with "
            "requires_grad_(False)"
        ]

    def after_step(self, everyone: Group) -> None:
        update_biases(self._model, everyone)
