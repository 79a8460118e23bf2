"""What MoE layers need from the engine that trains them."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import nn

from zeroexp.comm import Group, World
from zeroexp.moe.bias import update_biases
from zeroexp.moe.model import experts_left_out, moe_layers, name_layers
from zeroexp.moe.section import Layers


class ExpertCompanion:
    """See :class:`zeroexp.zero.companion.Companion`: numbers the layers of ``model``, connects
    the ranks that share experts, finds experts that nothing steps, and moves the biases that
    balance the load."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def join(self, world: World) -> None:
        name_layers(self._model)
        for layer in moe_layers(self._model).values():
            if layer.expert_parallel > 1:
                layer.connect(world.sharing(layer.expert_parallel).block)

    def warnings(self, stepped: Container[int]) -> list[str]:
        names = experts_left_out(self._model, stepped)
        if not names:
            return []
        return [
            f"no optimizer holds {names[0]} ({len(names)} parameters of experts): they will never "
            "be stepped. Build the optimizer after the experts, or freeze them with "
            "requires_grad_(False)"
        ]

    def after_step(self, *groups: Group) -> None:
        update_biases(self._model, *groups)

    def section(self, modules: Iterable[nn.Module]) -> Layers | None:
        layers = moe_layers(nn.ModuleList(modules))
        return Layers(list(layers.values())) if layers else None
