"""The gate: scores every token for every expert and decides.

Scores are computed in fp32 (fp64 where the input is), whatever the dtype of the model and under
autocast: bf16 scores tie, and ties send tokens elsewhere after a change of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroexp.errors import Problem
from zeroexp.moe.bias import Bias
from zeroexp.moe.capacity import Capacity
from zeroexp.moe.draws import Draws
from zeroexp.moe.routing import Routing


class Gate(nn.Module, ABC):
    """Linear scores of ``num_experts`` experts for tokens ``[S, d_model]``.

    ``jitter``: in training the input of the gate is multiplied by U(1 - jitter, 1 + jitter).
    ``bias_rate`` above 0 balances by a bias (:class:`Bias`). ``generator``: see
    :class:`zeroexp.moe.draws.Draws`. In eval nothing is drawn.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Arguments that this gate takes besides the common ones."""

    can_bias = False
    """Whether selection can add a bias to the scores."""

    chosen_by_tokens = True
    """Whether tokens choose experts; False: experts choose tokens."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        top_k: int,
        capacity: Capacity | None = None,
        jitter: float = 0.0,
        bias_rate: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity = capacity or Capacity()
        self.jitter = jitter
        self.draws = Draws(generator)
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = Bias(num_experts, bias_rate) if bias_rate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1, 1) / sqrt(d_model), as ``nn.Linear`` draws."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments, one entry each."""
        found = self.capacity.problems()
        if not 1 <= self.top_k <= self.num_experts:
            found.append(
                Problem(
                    "top_k",
                    f"{self.top_k} of {self.num_experts} experts.",
                    f"use 1 to {self.num_experts}",
                )
            )
        if not 0 <= self.jitter < 1:
            found.append(Problem("jitter", f"{self.jitter} is not in [0, 1).", "use 0.01"))
        if self.bias is not None and not self.can_bias:
            found.append(
                Problem("bias_rate", "this gate selects without a bias.", "use topk or sigmoid")
            )
        return found

    @property
    def noisy(self) -> bool:
        """Whether a forward pass in training draws random numbers."""
        drops = self.capacity.limit(training=True) is not None
        return self.jitter > 0 or (drops and self.capacity.priority == "random")

    @property
    def causal(self) -> bool:
        """Whether a token's experts and weights depend on earlier tokens alone (in eval)."""
        drops = self.capacity.limit(training=False) is not None
        return not drops or self.capacity.priority in ("position", "random")

    def forward(self, x_SC: Tensor) -> Routing:
        """Decide for ``x_SC``, the tokens of this rank."""
        generator = None
        if self.training and self.noisy:
            generator = self.draws.begin(x_SC.device)
        wide = torch.promote_types(x_SC.dtype, torch.float32)
        with torch.autocast(x_SC.device.type, enabled=False):
            x_SC = x_SC.to(wide)
            if generator is not None and self.jitter:
                noise = torch.rand(x_SC.shape, generator=generator, device=x_SC.device, dtype=wide)
                x_SC = x_SC * (1 - self.jitter + 2 * self.jitter * noise)
            logits_SE = F.linear(x_SC, self.weight.to(wide))
            return self.route(logits_SE, generator)

    @abstractmethod
    def route(self, logits_SE: Tensor, generator: torch.Generator | None) -> Routing:
        """The decision for given scores; ``generator`` is None where nothing may be drawn."""

    def places(self, tokens: int) -> int | None:
        """Places of one expert for a batch of ``tokens``; None is no limit."""
        return self.capacity.places(tokens, self.num_experts, self.top_k, training=self.training)

    def for_selection(self, scores_SE: Tensor) -> Tensor:
        """Detached scores with the bias, where there is one."""
        scores_SE = scores_SE.detach()
        return scores_SE if self.bias is None else scores_SE + self.bias.value
