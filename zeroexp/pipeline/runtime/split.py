"""A model becomes layers, and layers become the stages of this rank.

The protocol: a model that can be cut has a method ``pipeline_layers()`` that gives its layers in
order, as (name, module) pairs. Each layer takes one argument, what the layer before returned (the
first: the model's input), which is a nested value of tensors (:mod:`.tree`). Applied in turn they
are the model. Every parameter of the model belongs to a layer; one that belongs to several is tied.
``nn.Sequential`` needs no method: its children are its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from zeroexp.errors import ModelError
from zeroexp.pipeline.cut import Cut, Layer
from zeroexp.pipeline.runtime.stage import Context, Stage

NamedLayer = tuple[str, nn.Module]


@runtime_checkable
class Layered(Protocol):
    """A model that offers its layers."""

    def pipeline_layers(self) -> Sequence[NamedLayer]:
        """(name, layer) in order; each takes what the one before returned."""


class Chain(nn.Module):
    """Layers one after the other, under their names."""

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        super().__init__()
        self._order = [name.replace(".", "_") for name, _ in layers]
        for name, (_, layer) in zip(self._order, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, value: Any) -> Any:
        for name in self._order:
            value = self._modules[name](value)  # type: ignore[misc]
        return value


@dataclass(frozen=True)
class Split:
    """This rank's ``stages``, and its copies of weights that stages on other ranks hold too, by
    their names in the model (for :class:`.ties.Ties`)."""

    stages: tuple[Stage, ...]
    tied: dict[str, nn.Parameter]

    def names(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the model."""
        return {
            stage.names[name]: parameter
            for stage in self.stages
            for name, parameter in stage.module.named_parameters()
        }


def layers_of(model: nn.Module) -> list[NamedLayer]:
    """The layers of a model. Raises :class:`ModelError` for a model that offers none, or whose
    layers leave out a parameter."""
    if isinstance(model, Layered):
        layers = [(str(name), layer) for name, layer in model.pipeline_layers()]
    elif isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise ModelError(
                f"{type(model).__name__} is an nn.Sequential with a forward() of its own, which a "
                "pipeline would leave out. Give it a method pipeline_layers() that returns (name, "
                "module) pairs in order, each module taking what the one before returns"
            )
        layers = list(model._modules.items())  # used twice, there twice
    else:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages: it is no nn.Sequential and offers "
            "no layers. Give it a method pipeline_layers() that returns (name, module) pairs in "
            "order, each module taking what the one before returns"
        )
    names = [name for name, _ in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(f"{type(model).__name__}: layers share the name {', '.join(twice)}")
    covered = {id(p) for _, layer in layers for p in layer.parameters()}
    left = [name for name, p in model.named_parameters() if id(p) not in covered]
    if left:
        raise ModelError(
            f"{type(model).__name__}: no layer of pipeline_layers() holds {', '.join(left[:5])}"
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )
    return layers


def layer_sizes(layers: Sequence[NamedLayer]) -> list[Layer]:
    """Each layer's number of parameters, for a cut by parameters or by layers. A tied one counts in
    each layer that holds it: each stage has a copy."""
    return [Layer(name, sum(p.numel() for p in layer.parameters())) for name, layer in layers]


def split(
    model: nn.Module,
    cut: Cut,
    held: Sequence[int],
    *,
    recompute: bool = False,
    context: Context = nullcontext,
) -> Split:
    """The stages ``held`` (by ``Schedule.stages_of``) of ``model``, cut into
    ``Cut.num_stages``.

    The stages' modules are the model's own layers, so parameters keep their identity. Raises
    :class:`ModelError`; a stage without parameters is refused by name.
    """
    layers = layers_of(model)
    if cut.bounds[-1] != len(layers):
        raise ModelError(
            f"the cut is one of {cut.bounds[-1]} layers, {type(model).__name__} has {len(layers)}"
        )
    in_model = {id(p): name for name, p in model.named_parameters()}
    users: dict[int, set[int]] = {}
    for stage in range(cut.num_stages):
        for number in cut.stage(stage):
            for parameter in layers[number][1].parameters():
                users.setdefault(id(parameter), set()).add(stage)
    stages = []
    tied: dict[str, nn.Parameter] = {}
    for index in held:
        module = Chain([layers[number] for number in cut.stage(index)])
        names = {}
        for name, parameter in module.named_parameters():
            # A layer may hold a parameter that its model does not register.
            names[name] = in_model.get(id(parameter), name)
            if not users[id(parameter)] <= set(held):
                tied[names[name]] = parameter
        stages.append(Stage(index, module, names=names, recompute=recompute, context=context))
        stages[-1].refuse_if_empty()
    return Split(tuple(stages), tied)
