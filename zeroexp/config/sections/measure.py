"""measure: how figures are taken."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """Steps that count, and how often a row is written."""

    warmup_steps: int = setting(
        5,
        "steps left out of throughput and step time.",
        changes="tokens_per_s, step_time_s and mfu of result.json",
        minimum=0,
        unit="steps",
    )
    log_every: int = setting(
        1,
        "steps between rows of metrics.jsonl.",
        changes="how many rows metrics.jsonl has",
        minimum=1,
        unit="steps",
        digest=False,
    )
