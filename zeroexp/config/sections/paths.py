"""paths: where output goes."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class PathsConfig:
    """Directories."""

    runs: str = setting(
        "runs",
        "directory of all runs. Relative to where the command is started.",
        changes="where <name>/<time>-<tag>/ is made",
        digest=False,
    )
