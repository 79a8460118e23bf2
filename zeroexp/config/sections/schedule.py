"""schedule: the learning rate over the steps."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """A factor on optim.lr. It advances only when a step was applied."""

    kind: str = setting(
        "constant",
        "shape of the learning rate over the steps.",
        changes="the learning rate of each step",
        choices=("constant", "linear", "warmup_cosine", "inverse_sqrt", "one_cycle"),
    )
    warmup_steps: int = setting(
        0,
        "steps of linear rise to the peak. 0 starts at the peak; for one_cycle: steps up and again "
        "down, where 0 takes half of total_steps.",
        changes="the learning rate of the first steps",
        minimum=0,
        unit="steps",
    )
    total_steps: int | None = setting(
        None,
        "step at which the schedule ends. none: trainer.max_steps.",
        changes="how fast the learning rate falls",
        minimum=1,
        unit="steps",
        kinds=("linear", "warmup_cosine", "one_cycle"),
    )
    min_ratio: float = setting(
        0.0,
        "lowest factor on optim.lr after the warm-up.",
        changes="the learning rate at the end",
        minimum=0,
        maximum=1,
        kinds=("linear", "warmup_cosine", "inverse_sqrt", "one_cycle"),
    )
