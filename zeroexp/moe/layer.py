"""A layer of which each token uses a part: gate, experts, and what runs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroexp.comm import Group
from zeroexp.config.nearest import nearest
from zeroexp.errors import ConfigError, ModelError, Problem
from zeroexp.moe.capacity import Capacity
from zeroexp.moe.dispatch import LocalDispatch, RemoteDispatch
from zeroexp.moe.experts import MLP, Expert, ExpertParameter, make_experts
from zeroexp.moe.gate import Gate
from zeroexp.moe.losses import LossWeights
from zeroexp.moe.registry import GATES, usual_gate
from zeroexp.moe.routing import Routing
from zeroexp.moe.statistics import Statistics
from zeroexp.zero.companion import Forward

if TYPE_CHECKING:
    from zeroexp.moe.companion import ExpertCompanion

UNTAKEN = 64
"""Forward passes in training whose losses may lie untaken before it is an error."""


class MoE(nn.Module):
    """``num_experts`` experts, of which a gate gives every token ``top_k``: ``[..., d_model]`` to
    the same shape.

    ``expert``: an :class:`MLP` (fast: all experts together), a module (copied), or a factory.
    ``gate``: a name of :data:`zeroexp.moe.registry.GATES` (None: ``top1``, ``top2`` or ``topk`` by
    ``top_k``) with ``gate_options`` of its own, or a :class:`Gate`. ``capacity_factor`` None is
    dropless; see :class:`Capacity`. ``shared`` is a module for all tokens, whose output is added;
    ``residual`` one that is mixed in by weights of its own, ``w0 * moe + w1 * residual`` (PR-MoE,
    arXiv:2201.05596). ``*_loss`` weigh the losses that :func:`zeroexp.moe.auxiliary_loss` returns;
    ``bias_rate`` balances without a loss, by :func:`zeroexp.moe.update_biases`.

    ``expert_parallel``: the neighbouring data-parallel ranks the experts are spread over, in blocks
    in rank order; 1: all are here. The engine that trains the model connects them; by hand give
    their ``group`` instead. An expert's gradient is then the sum over the tokens of the whole
    group: reduced over the ranks that hold the same experts and divided by all data-parallel ranks
    it is the mean, whatever the size of the group. Raises :class:`ConfigError` with everything that
    is wrong.
    """

    def __init__(
        self,
        d_model: int,
        expert: Expert,
        num_experts: int,
        top_k: int = 1,
        *,
        gate: str | Gate | None = None,
        gate_options: Mapping[str, Any] | None = None,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        priority: str | None = None,
        jitter: float = 0.0,
        shared: nn.Module | None = None,
        residual: nn.Module | None = None,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        sequence_loss: float = 0.0,
        bias_rate: float = 0.0,
        expert_parallel: int = 1,
        group: Group | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        name = usual_gate(top_k) if gate is None else gate
        # GShard gives every first choice a place before any second one.
        order = priority or ("choice" if name == "top2" else "position")
        capacity = Capacity(capacity_factor, eval_capacity_factor, min_capacity, order)
        weights = LossWeights(balance=balance_loss, z=z_loss, sequence=sequence_loss)
        size = expert_parallel if group is None else group.size
        problems = _sizes(d_model, num_experts, size) + weights.problems()
        if group is None:
            problems += _rank_problems(size)
        if isinstance(expert, MLP):
            problems += expert.problems()
        made: Gate | None = None
        if isinstance(gate, Gate):
            made = gate
            sizes = {"num_experts": num_experts, "top_k": top_k}
            problems += _given_gate_problems(
                gate,
                sizes,
                gate_options=gate_options,
                capacity_factor=capacity_factor,
                eval_capacity_factor=eval_capacity_factor,
                priority=priority,
                jitter=jitter or None,
                bias_rate=bias_rate or None,
                generator=generator,
            )
        if isinstance(name, str):
            problems += _gate_problems(name, gate_options or {})
            if not problems:
                made = GATES[name](
                    d_model,
                    num_experts,
                    top_k=top_k,
                    capacity=capacity,
                    jitter=jitter,
                    bias_rate=bias_rate,
                    generator=generator,
                    **(gate_options or {}),
                )
        if made is not None:
            problems += made.problems()
            if sequence_loss and not made.chosen_by_tokens:
                problem = "experts that choose tokens are even without it."
                problems.append(Problem("sequence_loss", problem, "use 0"))
        if problems or made is None:
            raise ConfigError(problems)

        self.d_model = d_model
        self.num_experts = num_experts
        self.gate = made
        self.weights = weights
        self.expert_parallel = size
        """Ranks that have all experts together."""
        self.group = group if size > 1 else None
        index, local = (_rank() % size if group is None else group.index), num_experts // size
        ids = range(index * local, (index + 1) * local)
        self.experts = make_experts(d_model, expert, ids, num_experts)
        if any(isinstance(module, MoE) for module in self.experts.modules()):
            problem = "an expert holds a MoE layer itself: its experts would lie in two groups."
            fix = "use one layer with all the experts"
            raise ConfigError([Problem("expert", problem, fix)])
        self.shared = shared
        self.residual = residual
        self.mix = nn.Linear(d_model, 2) if residual is not None else None
        self.statistics = Statistics(num_experts)
        self.path = ""
        self.tag = 0
        self._untaken: list[Tensor] = []
        self._recorded = False  # whether the losses of any pass were kept for take_loss
        self.forward_is = Forward.WHOLE
        """What the next forward pass is in the schedule of who runs this layer."""

    @property
    def where(self) -> str:
        """The layer in messages."""
        return f"MoE layer {self.path}" if self.path else "a MoE layer"

    @property
    def draws_random(self) -> bool:
        """Whether a forward pass in training draws random numbers; a recomputation must then
        restore torch's random state."""
        return self.gate.noisy

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., d_model]``; tokens without a place get zeros from the experts. Raises
        :class:`ModelError`."""
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise ModelError(
                f"{self.where} takes [..., {self.d_model}] and got {tuple(x.shape)}: give it "
                f"tokens of {self.d_model} channels, or build it with d_model={x.shape[-1]}."
            )
        x_SC = x.reshape(-1, self.d_model)
        routing = self.gate(x_SC)
        dispatch: LocalDispatch | RemoteDispatch
        if self.expert_parallel == 1:
            dispatch = LocalDispatch(x_SC, routing)
        else:
            dispatch = RemoteDispatch(
                x_SC,
                routing,
                self._connected(),
                tag=self.tag,
                where=self.where,
                done=self.statistics.transferred,
            )
        # Here, because these need nothing from other ranks: the rows travel meanwhile.
        shared = None if self.shared is None else self.shared(x)
        residual = None if self.residual is None else self.residual(x)
        losses = self.weights.losses(routing, x.shape[:-2].numel())
        rows, counts_E = dispatch.arrived()
        y = dispatch.combine(self.experts(rows, counts_E, self.where)).view(x.shape)
        if torch._C._current_graph_task_id() == -1:
            self._record(routing, losses)
        elif losses and not self._recorded and self.forward_is is not Forward.TRIAL:
            raise ModelError(
                f"{self.where}: recomputed in backward, but its losses were not there in forward: "
                "checkpoint(..., use_reentrant=True) runs it without a graph first, and nothing "
                "would balance the experts. Use use_reentrant=False."
            )
        if self.mix is not None and residual is not None:
            share = self.mix(x).softmax(dim=-1)
            y = y * share[..., :1] + residual * share[..., 1:]
        return y if shared is None else y + shared

    def connect(self, group: Group) -> None:
        """Exchange tokens over ``group`` from now on. Raises :class:`ModelError` where the experts
        were made for other ranks."""
        if group.size != self.expert_parallel or group.index != self.experts.place_of_rank:
            raise ModelError(
                f"{self.where} has share {self.experts.place_of_rank} of {self.expert_parallel} of "
                f"its experts, and this rank is number {group.index} of {group.size} that share "
                "them: build the model on the rank that trains it."
            )
        self.group = group

    def _connected(self) -> Group:
        if self.group is None:
            raise ModelError(
                f"{self.where}: its experts lie on {self.expert_parallel} ranks, and nothing "
                "connects them. Train it with zeroexp.initialize() or the strategy, or give the "
                "layer a group."
            )
        return self.group

    def _record(self, routing: Routing, losses: dict[str, Tensor]) -> None:
        """Count a forward pass. A recomputation in backward is the same pass again."""
        if self.forward_is is Forward.TRIAL:
            return
        again = self.forward_is is Forward.AGAIN
        if not again:
            self.statistics.record(routing, losses)
        if not self.training:
            return
        if self.gate.bias is not None and not again:
            self.gate.bias.observe(routing.load_E)
        if losses and (torch.is_grad_enabled() or self.forward_is is Forward.FIRST):
            self._recorded |= torch.is_grad_enabled()
            self.give_loss(self.weights.total(losses))

    def give_loss(self, loss: Tensor) -> None:
        """Keep ``loss`` for :meth:`take_loss`. Raises :class:`ModelError` where nobody takes
        any."""
        if len(self._untaken) >= UNTAKEN:
            raise ModelError(
                f"{self.where}: the losses of {UNTAKEN} forward passes were never used, so "
                "nothing balances its experts. Add zeroexp.moe.auxiliary_loss(model) to the "
                "loss of every forward pass, or build the layer with balance_loss=0 (and "
                "z_loss, sequence_loss)."
            )
        self._untaken.append(loss)

    def take_loss(self) -> Tensor | None:
        """The weighted losses of all forward passes in training since the last call, summed; None
        where there were none."""
        taken, self._untaken = self._untaken, []
        return torch.stack(taken).sum() if taken else None

    def expert_parameters(self) -> Iterator[ExpertParameter]:
        """Every parameter of an expert of this rank, with its global ids; names start below this
        layer. The rest of the layer is like any other module: equal on all ranks."""
        for p in self.experts.expert_parameters():
            full = f"experts.{p.name}"
            yield ExpertParameter(full, p.parameter, p.experts, p.num_experts, p.stacked)

    @staticmethod
    def zeroexp_companion(model: nn.Module) -> ExpertCompanion:
        """What the engine calls for all MoE layers of ``model``."""
        from zeroexp.moe.companion import ExpertCompanion  # it looks for layers: known after them

        return ExpertCompanion(model)

    def extra_repr(self) -> str:
        ids = self.experts.ids
        return f"d_model={self.d_model}, experts {ids.start}..{ids.stop - 1} of {self.num_experts}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rank_problems(size: int) -> list[Problem]:
    """Why the experts of this rank cannot be known, if they are spread over ``size`` ranks."""
    if size < 1:
        return [Problem("expert_parallel", f"{size} ranks.", "use 1 or more")]
    if size == 1:
        return []
    if not dist.is_initialized():
        problem = f"{size} ranks, but torch.distributed is not initialised."
        fix = "build the model after init_process_group() (in Lightning: in configure_model())"
        return [Problem("expert_parallel", problem, fix)]
    ranks = dist.get_world_size()
    if ranks % size:
        fits = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        problem = f"{size} does not divide the {ranks} ranks."
        return [Problem("expert_parallel", problem, f"use {' or '.join(fits)}")]
    return []


def _sizes(d_model: int, num_experts: int, ranks: int) -> list[Problem]:
    found = []
    if d_model < 1:
        found.append(Problem("d_model", f"{d_model} channels.", "use 1 or more"))
    if num_experts < 1:
        found.append(Problem("num_experts", f"{num_experts} experts.", "use 1 or more"))
    elif ranks > 0 and num_experts % ranks:
        near = [n for n in (num_experts // ranks * ranks, -(-num_experts // ranks) * ranks) if n]
        fits = [n for n in range(1, ranks) if num_experts % n == 0]
        found.append(
            Problem(
                "num_experts",
                f"{num_experts} experts do not divide over an expert-parallel group of {ranks} "
                "ranks.",
                f"use {' or '.join(map(str, near))} experts, or a group of "
                f"{' or '.join(map(str, fits))}",
            )
        )
    return found


def _given_gate_problems(gate: Gate, sizes: Mapping[str, int], **unused: Any) -> list[Problem]:
    """What a gate that is built already contradicts, and what it can no longer be told."""
    found = [
        Problem(key, f"{value}, but the gate has {getattr(gate, key)}.", "make them equal")
        for key, value in sizes.items()
        if getattr(gate, key) != value
    ]
    for key, value in unused.items():
        if value is not None:
            problem = "the gate is built already."
            found.append(Problem(key, problem, "give it to the gate, or name a gate"))
    return found


def _gate_problems(name: str, options: Mapping[str, Any]) -> list[Problem]:
    if name not in GATES:
        close = nearest(name, GATES) or list(GATES)
        return [Problem("gate", f"{name!r} is not known.", f"use {' or '.join(close)}")]
    known = GATES[name].options
    fix = f"use {' or '.join(known)}" if known else "it takes none"
    return [
        Problem("gate_options", f"{name} does not take {option!r}.", fix)
        for option in options
        if option not in known
    ]
