"""recompute: activations that are computed again in backward instead of kept."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class RecomputeConfig:
    """Activation checkpointing of the built-in models."""

    kind: str = setting(
        "none",
        "which activations are recomputed in backward. none: all are kept; full: every block "
        "keeps only its input.",
        changes="peak activation bytes against one more forward pass; never the results",
        choices=("none", "full"),
    )
