"""Configuration: typed sections, one report for all problems, and no torch.

``Config.from_mapping`` builds from a mapping, ``load`` from a mapping or a file, ``compose`` from a
command line.
"""

from __future__ import annotations

from zeroexp.config.tree import Config

__all__ = ["Config"]
