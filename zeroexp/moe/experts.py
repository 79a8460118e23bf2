"""The experts of one rank.

Every expert is called in every forward pass, also with no row at all: hooks that gather and reduce
its weights fire alike on all ranks, and its gradients are zeros, not None, whichever rank its
tokens went to.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.config.nearest import nearest
from zeroexp.errors import ConfigError, ModelError, Problem
from zeroexp.layout import Share
from zeroexp.moe.activations import ACTIVATIONS
from zeroexp.moe.draws import draw_key
from zeroexp.moe.segments import Linear, grouped_mlp
from zeroexp.zero.sharded_init import built_whole


@dataclass(frozen=True)
class MLP:
    """The built-in expert: ``down(activation(up(x)))`` with ``hidden`` channels between; for
    ``swiglu`` ``down(silu(gate(x)) * up(x))``. All experts of a rank are computed together.

    ``std``: weights into and out of the hidden channels are drawn from N(0, std^2), biases are 0;
    None draws as ``nn.Linear`` does."""

    hidden: int
    activation: str = "gelu"
    bias: bool = True
    std: tuple[float, float] | None = None

    def problems(self) -> list[Problem]:
        """What is wrong with the sizes."""
        found = []
        if self.hidden < 1:
            problem = f"hidden width {self.hidden}."
            found.append(Problem("expert", problem, "use 1 or more, e.g. 4 * d_model"))
        if self.activation not in ACTIVATIONS:
            close = nearest(self.activation, ACTIVATIONS) or list(ACTIVATIONS)
            problem = f"activation {self.activation!r} is not known."
            found.append(Problem("expert", problem, f"use {' or '.join(close)}"))
        if self.std is not None and not all(std >= 0 for std in self.std):
            found.append(Problem("expert", f"std {self.std}.", "use 0 or more, e.g. (0.02, 0.02)"))
        return found


@contextmanager
def seeded(key: int, expert: int) -> Iterator[None]:
    """Torch's generators as ``key`` and the expert's id say, and afterwards as they were."""
    # Not torch.manual_seed: it also seeds accelerators that start later, and each rank has experts
    # of its own.
    seed = (key + expert) % (1 << 63)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    cpu = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        if cuda is not None:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


Expert = MLP | nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class ExpertParameter:
    """A parameter and the experts it belongs to.

    ``name`` is its name below the module that was asked; ``experts`` are global ids. ``stacked``:
    dimension 0 counts these experts, so the parameter is the slice ``[experts.start,
    experts.stop)`` of one that holds all ``num_experts``. Else it is of the one expert, whose id is
    in the name.
    """

    name: str
    parameter: nn.Parameter
    experts: range
    num_experts: int
    stacked: bool


class Experts(nn.Module, ABC):
    """The experts ``ids`` of ``num_experts``."""

    def __init__(self, ids: range, num_experts: int) -> None:
        super().__init__()
        self.ids = ids
        self.num_experts = num_experts

    @property
    def num_ranks(self) -> int:
        """Ranks that have all experts together."""
        return self.num_experts // len(self.ids)

    @property
    def place_of_rank(self) -> int:
        """The place of this rank among them."""
        return self.ids.start // len(self.ids)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A checkpoint has all experts: this rank takes its own.
        if self.num_ranks > 1:
            self._take_own(state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)

    def _take_own(self, state: dict[str, Any], prefix: str) -> None:
        for name in self._parameters:
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.dim() and len(value) == self.num_experts:
                state[prefix + name] = value[self.ids.start : self.ids.stop]

    def zeroexp_share(self, name: str) -> Share | None:
        """See :class:`zeroexp.zero.shares.Spread`; here all experts lie in one tensor."""
        return Share(self.num_ranks, self.place_of_rank)

    @abstractmethod
    def forward(self, rows_AC: Tensor, counts_E: Tensor, where: str) -> Tensor:
        """Each row through its expert: the first ``counts_E[0]`` through the first, and so on.

        ``where`` names the layer in errors. Raises :class:`ModelError` for an expert that changes
        the shape.
        """

    @abstractmethod
    def expert_parameters(self) -> Iterator[ExpertParameter]:
        """Every parameter with its global expert ids."""


class GroupedExperts(Experts):
    """Built-in MLPs, stacked: weights ``[experts, in, out]``, biases ``[experts, out]``."""

    def __init__(self, d_model: int, mlp: MLP, ids: range, num_experts: int, key: int) -> None:
        super().__init__(ids, num_experts)
        self._key = key
        self.activation = mlp.activation
        self._std = mlp.std
        n, hidden = len(ids), mlp.hidden

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(n, *shape))

        self.up = weight(d_model, hidden)
        self.gate = weight(d_model, hidden) if mlp.activation == "swiglu" else None
        self.down = weight(hidden, d_model)
        self.up_bias = weight(hidden) if mlp.bias else None
        self.gate_bias = weight(hidden) if mlp.bias and self.gate is not None else None
        self.down_bias = weight(d_model) if mlp.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1, 1) / sqrt(width of the input), as ``nn.Linear`` draws, or what ``MLP.std`` says;
        the same numbers for an expert wherever it lies."""
        into, out = self._std or (None, None)
        for place, expert in enumerate(self.ids):
            with seeded(self._key, expert):
                for weight, bias, std in (
                    (self.up, self.up_bias, into),
                    (self.gate, self.gate_bias, into),
                    (self.down, self.down_bias, out),
                ):
                    if weight is not None:
                        _draw(
                            weight.detach()[place],
                            None if bias is None else bias.detach()[place],
                            std,
                        )

    def forward(self, rows_AC: Tensor, counts_E: Tensor, where: str) -> Tensor:
        into = [Linear(self.up, self.up_bias)]
        if self.gate is not None:
            into.append(Linear(self.gate, self.gate_bias))
        activation = ACTIVATIONS[self.activation]
        return grouped_mlp(rows_AC, counts_E, into, activation, Linear(self.down, self.down_bias))

    def expert_parameters(self) -> Iterator[ExpertParameter]:
        for name, parameter in self.named_parameters():
            yield ExpertParameter(name, parameter, self.ids, self.num_experts, stacked=True)


def _draw(weight_IO: Tensor, bias_O: Tensor | None, std: float | None) -> None:
    if std is not None:
        nn.init.normal_(weight_IO, std=std)
        if bias_O is not None:
            nn.init.zeros_(bias_O)
        return
    bound = weight_IO.shape[0] ** -0.5
    for values in (weight_IO, bias_O):
        if values is not None:
            nn.init.uniform_(values, -bound, bound)


class ModuleExperts(Experts):
    """Any modules that keep the shape of their input, one after the other.

    A factory is called once per expert, and draws the same weights for an expert wherever it lies.
    A module is copied as it is: all experts start with its weights (sparse upcycling,
    arXiv:2212.05055).
    """

    def __init__(
        self, expert: nn.Module | Callable[[], nn.Module], ids: range, num_experts: int, key: int
    ) -> None:
        super().__init__(ids, num_experts)
        made: dict[int, nn.Module] = {}
        for i in ids:
            with seeded(key, i), built_whole() if self.num_ranks > 1 else nullcontext():
                one = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
            made[i] = _module(one, made.values())
            self.add_module(str(i), one)  # named by its global id, as in a checkpoint

    def forward(self, rows_AC: Tensor, counts_E: Tensor, where: str) -> Tensor:
        parts = []
        for rows, (i, expert) in zip(
            rows_AC.split(counts_E.tolist()), self.named_children(), strict=True
        ):
            out = expert(rows)
            if not isinstance(out, Tensor) or out.shape != rows.shape:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ModelError(
                    f"{where}: expert {i} turned rows of shape {tuple(rows.shape)} into {got}. "
                    "An expert takes rows [tokens, d_model] and returns a tensor of the same "
                    f"shape: let its last layer have the width {rows.shape[1]}."
                )
            parts.append(out)
        return torch.cat(parts)

    def _take_own(self, state: dict[str, Any], prefix: str) -> None:
        theirs = tuple(f"{prefix}{i}." for i in range(self.num_experts) if i not in self.ids)
        for name in [n for n in state if n.startswith(theirs)]:
            del state[name]

    def zeroexp_share(self, name: str) -> Share | None:
        expert, dot, rest = name.partition(".")
        place = self.ids.index(int(expert))
        firsts = range(0, self.num_experts, len(self.ids))
        ends = tuple(f"{first + place}{dot}{rest}" for first in firsts)
        return Share(self.num_ranks, self.place_of_rank, ends)

    def expert_parameters(self) -> Iterator[ExpertParameter]:
        for i, expert in self.named_children():
            ids = range(int(i), int(i) + 1)
            for name, parameter in expert.named_parameters(prefix=i):
                yield ExpertParameter(name, parameter, ids, self.num_experts, stacked=False)


def _module(made: object, before: Collection[nn.Module]) -> nn.Module:
    """What a factory of the user's returned, if it is a module of its own."""
    if not isinstance(made, nn.Module):
        problem = f"the factory made a {type(made).__name__}."
        raise ConfigError([Problem("expert", problem, "let it return an nn.Module")])
    if any(made is other for other in before):
        problem = "the factory returned one module twice, so experts would share weights."
        raise ConfigError([Problem("expert", problem, "let it build a new one in every call")])
    return made


def make_experts(d_model: int, expert: Expert, ids: range, num_experts: int) -> Experts:
    """The experts ``ids``. One number is drawn from torch's generator, however many they are."""
    key = draw_key()
    if isinstance(expert, MLP):
        return GroupedExperts(d_model, expert, ids, num_experts, key)
    return ModuleExperts(expert, ids, num_experts, key)
