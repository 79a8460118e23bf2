"""checkpoint: what is saved and what is resumed."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Saving during a run, and the start from a saved one."""

    kind: str = setting(
        "none",
        "format of checkpoints. none saves nothing; full: whole fp32 tensors by name, written by "
        "rank 0.",
        changes="whether checkpoints/ is written",
        choices=("none", "full"),
        digest=False,
    )
    every: int = setting(
        100,
        "steps between checkpoints. The last step is saved as well.",
        changes="when a checkpoint is written",
        minimum=1,
        unit="steps",
        digest=False,
        kinds=("full",),
    )
    keep: int = setting(
        1,
        "newest checkpoints that stay. Older ones are deleted.",
        changes="disk space of checkpoints/",
        minimum=1,
        digest=False,
        kinds=("full",),
    )
    resume: str | None = setting(
        None,
        "checkpoint to continue from. A checkpoint, a run directory (its newest one), or auto "
        "(the newest run of this name and configuration); none starts anew.",
        changes="initial weights, optimizer state and step",
    )
