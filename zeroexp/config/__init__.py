"""Configuration: typed sections, one report for all problems, and no torch.

``Config.from_mapping`` builds from a mapping, ``load`` from a mapping or a file, ``compose`` from a
command line, ``parse_multirun`` makes the command lines of a sweep, ``explain`` tells about a key.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeroexp.config.stepping import steps_in_backward, waits_for
from zeroexp.config.tree import Config

if TYPE_CHECKING:
    from zeroexp.config.composition import Composed, compose
    from zeroexp.config.explanation import explain
    from zeroexp.config.files import load
    from zeroexp.config.multirun import is_multirun, parse_multirun

# Hydra takes longer to import than everything else here: only those who compose pay for it.
_OWNERS = {
    "Composed": "zeroexp.config.composition",
    "compose": "zeroexp.config.composition",
    "explain": "zeroexp.config.explanation",
    "is_multirun": "zeroexp.config.multirun",
    "load": "zeroexp.config.files",
    "parse_multirun": "zeroexp.config.multirun",
}

__all__ = [
    "Composed",
    "Config",
    "compose",
    "explain",
    "is_multirun",
    "load",
    "parse_multirun",
    "steps_in_backward",
    "waits_for",
]


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(importlib.import_module(_OWNERS[name]), name)
    raise AttributeError(f"module 'zeroexp.config' has no attribute {name!r}")
