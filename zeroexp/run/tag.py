"""The short label of a run, made from what its command line changes."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.config import Config

# Overrides that say where and how a run is carried out, not which one it is.
_SILENT = ("paths.", "paths=", "name=", "tag=", "launch.", "launch=", "logger.", "logger=", "debug")


def tag_of(config: Config, overrides: Sequence[str]) -> str:
    """``config.tag``, or the overrides that tell this run from others, joined by commas."""
    if config.tag is not None:
        return config.tag
    return ",".join(word for word in overrides if not word.startswith(_SILENT))
