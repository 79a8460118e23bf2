"""How many tokens an expert takes, and which ones it turns away when more want it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroexp.config.nearest import nearest
from zeroexp.errors import Problem

PRIORITIES = ("position", "choice", "probs", "random")


@dataclass(frozen=True)
class Capacity:
    """Places per expert: ``max(ceil(tokens / experts * factor * k), minimum)``, as DeepSpeed counts
    them (GShard's 2N/E at k = 2 and factor 1; Switch's factor * tokens / experts at k = 1).

    ``factor`` None or infinite is dropless: an expert takes all who come; ``eval_factor`` None: as
    in training.
    ``priority`` says who goes first:

    ``position``
        the earlier token. The only one under which a token never depends on later ones.
    ``choice``
        all first choices, then all second ones (GShard); inside each the earlier token.
    ``probs``
        the higher gate value.
    ``random``
        drawn anew each time, so no place in the batch is favoured; in eval by position.
    """

    factor: float | None = None
    eval_factor: float | None = None
    minimum: int = 4
    priority: str = "position"

    def problems(self) -> list[Problem]:
        """What is wrong with the numbers."""
        found = []
        for key, factor in (
            ("capacity_factor", self.factor),
            ("eval_capacity_factor", self.eval_factor),
        ):
            if factor is not None and not factor > 0:
                problem = f"{factor} leaves no place for a token."
                found.append(Problem(key, problem, "use 1.25, or None for no limit"))
        if self.minimum < 0:
            found.append(Problem("min_capacity", f"{self.minimum} is negative.", "use 4"))
        if self.priority not in PRIORITIES:
            close = nearest(self.priority, PRIORITIES) or PRIORITIES
            found.append(
                Problem("priority", f"{self.priority!r} is not known.", f"use {' or '.join(close)}")
            )
        return found

    def limit(self, training: bool) -> float | None:
        """The factor that counts now; None is dropless."""
        train = training or self.eval_factor is None
        factor = self.factor if train else self.eval_factor
        return None if factor == math.inf else factor

    def places(self, tokens: int, experts: int, k: int, *, training: bool) -> int | None:
        """Places of one expert for a batch of ``tokens``; None is no limit."""
        factor = self.limit(training)
        if factor is None:
            return None
        return max(math.ceil(tokens / experts * (factor * k)), self.minimum)
