"""The loss scale of half-precision training (Micikevicius et al., arXiv:1710.03740, section
3.2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zeroexp.config.sections.precision import LossScaleConfig
from zeroexp.errors import NonFiniteError


@dataclass
class _State:
    value: float
    hysteresis_left: int
    clean_steps: int = 0


class LossScale:
    """A factor on the loss that keeps small gradients representable; pure arithmetic, the same on
    all ranks.

    Dynamic: an overflow multiplies by ``backoff`` once ``hysteresis`` overflows have been used up;
    ``interval`` clean steps after the first clean step following the start or an overflow, and
    every ``interval`` from there, multiply by ``growth`` (DeepSpeed's convention: the first
    doubling comes on clean step ``interval + 1``) and refill the hysteresis. At ``floor`` a further
    overflow is an error, since halving for ever would train nothing.
    """

    MAXIMUM = 2.0**24
    """The scale never grows beyond this: a scaled fp32 loss must stay finite."""

    def __init__(self, config: LossScaleConfig, *, dynamic: bool, active: bool) -> None:
        self._config = config
        self.dynamic = dynamic
        self._state = _State(config.init if active else 1.0, config.hysteresis)

    @property
    def value(self) -> float:
        return self._state.value

    @property
    def at_floor(self) -> bool:
        """Whether the next overflow is, or may be, the error of :meth:`update`."""
        return self.dynamic and self.value <= self._config.floor

    def update(self, overflow: bool, *, culprit: str = "") -> None:
        """Account for one boundary. Raises :class:`NonFiniteError` on an overflow at the floor;
        ``culprit`` names the first parameter with a non-finite gradient."""
        if not self.dynamic:
            return
        config, state = self._config, self._state
        if overflow:
            state.clean_steps = 0
            if state.hysteresis_left > 1:
                state.hysteresis_left -= 1
                return
            if state.value <= config.floor:
                raise NonFiniteError(
                    f"gradients overflow even at the smallest loss scale: scale {state.value:g}, "
                    f"precision.loss_scale.floor={config.floor:g}, first non-finite gradient in "
                    f"{culprit or 'unknown'}. "
                    "Look for a division by zero or a learning rate that is too high; bf16 has "
                    "the range of fp32."
                )
            state.value = max(state.value * config.backoff, config.floor)
            return
        if state.clean_steps > 0 and state.clean_steps % config.interval == 0:
            state.value = min(state.value * config.growth, self.MAXIMUM)
            state.hysteresis_left = config.hysteresis
        state.clean_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = _State(**state)
