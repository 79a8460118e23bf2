"""Sections whose capability is not here yet: they exist so that `none` can be written, and refuse
the rest by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism."""

    kind: str = setting(
        "none",
        "pipeline schedule. none: every rank holds all layers; the schedules arrive with pipeline "
        "parallelism.",
        changes="nothing yet: every other value is refused by name",
        choices=("none",),
    )
