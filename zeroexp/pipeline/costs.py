"""What the actions of every stage cost: seconds and bytes of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import Action, Kind


@dataclass(frozen=True)
class Costs:
    """Per stage: ``forward``, ``input_grad``, ``weight_grad`` (seconds; a whole backward is the sum
    of the last two) and ``activations`` (bytes that stay alive from forward to backward). Between
    stage s and s+1: ``transfer`` (seconds, either direction) and ``sent`` (bytes, either
    direction). ``kept`` is the share of the activations that the weight gradient still needs when
    the input gradient is done. Any unit of time will do if it is the same everywhere.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activations: tuple[float, ...]
    transfer: tuple[float, ...]
    sent: tuple[float, ...]
    kept: float = 0.5

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name, size in (
            ("input_grad", stages),
            ("weight_grad", stages),
            ("activations", stages),
            ("transfer", stages - 1),
            ("sent", stages - 1),
        ):
            found = len(getattr(self, name))
            if found != size:
                raise ScheduleError(
                    f"costs of {stages} stages need {size} values of {name}, not {found}"
                )
        for name in ("forward", "input_grad", "weight_grad", "activations", "transfer", "sent"):
            if any(not value >= 0 for value in getattr(self, name)):
                raise ScheduleError(f"costs: {name} has a value that is negative or not a number")
        if not 0 <= self.kept <= 1:
            raise ScheduleError(f"costs: kept is a share between 0 and 1, not {self.kept}")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        input_grad: float = 1,
        weight_grad: float = 1,
        *,
        activations: float = 0,
        transfer: float = 0,
        sent: float = 0,
        kept: float = 0.5,
    ) -> Costs:
        """``stages`` equal stages; every value is that of one stage, or one boundary."""
        return cls(
            (forward,) * stages,
            (input_grad,) * stages,
            (weight_grad,) * stages,
            (activations,) * stages,
            (transfer,) * (stages - 1),
            (sent,) * (stages - 1),
            kept,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def duration(self, action: Action) -> float:
        """Seconds of a compute action; 0 for anything else."""
        s = action.stage
        if action.kind is Kind.FORWARD:
            return self.forward[s]
        if action.kind is Kind.BACKWARD_INPUT:
            return self.input_grad[s]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.weight_grad[s]
        return self.input_grad[s] + self.weight_grad[s] if action.kind is Kind.BACKWARD else 0
