"""Configuration: typed sections, one report for all problems, and no torch.

``Config.from_mapping`` builds from a mapping, ``load`` from a mapping or a file, ``compose`` from a
command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeroexp.config.tree import Config

if TYPE_CHECKING:
    from zeroexp.config.composition import Composed, compose

# Hydra takes longer to import than everything else here: only those who compose pay for it.
_OWNERS = {
    "Composed": "zeroexp.config.composition",
    "compose": "zeroexp.config.composition",
}

__all__ = ["Composed", "Config", "compose"]


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(importlib.import_module(_OWNERS[name]), name)
    raise AttributeError(f"module 'zeroexp.config' has no attribute {name!r}")
