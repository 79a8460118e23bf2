"""launch: how worker processes are started and watched."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Start of the ranks."""

    kind: str = setting(
        "local",
        "who starts the ranks. local: train.py, with torchrun's elastic agent; external: they run "
        "already, under torchrun or Slurm.",
        changes="which processes are started",
        choices=("local", "external"),
        digest=False,
    )
    timeout: float = setting(
        300.0,
        "seconds a collective waits for the slowest rank.",
        changes="when a hanging run ends with status timeout",
        above=0,
        unit="seconds",
        digest=False,
    )
    threads_per_rank: int | None = setting(
        None,
        "compute threads of each rank. none: cores / ranks of the node.",
        changes="OMP_NUM_THREADS and torch's threads of every rank",
        minimum=1,
    )
    retries: int = setting(
        0,
        "times the ranks are started again after a crash.",
        changes="whether a crash ends the run",
        minimum=0,
        digest=False,
    )
    guard: str = setting(
        "refuse",
        "what a plan that does not fit does. For state in memory and swap files on disk: refuse "
        "the run with status wont_fit, warn, or off.",
        changes="whether a run starts that is planned to exceed memory or disk",
        choices=("refuse", "warn", "off"),
        digest=False,
    )
