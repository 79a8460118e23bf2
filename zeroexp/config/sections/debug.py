"""debug: help for finding a fault."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """Checks that cost time."""

    detect_anomaly: bool = setting(
        False,
        "let autograd name the forward operation behind a NaN. Slow.",
        changes="the error of a NaN in backward",
        digest=False,
    )
