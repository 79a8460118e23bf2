"""zeroexp: experiments with models that do not fit. Importing this package imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zeroexp.config import Config
    from zeroexp.engine import Engine
    from zeroexp.loop import initialize
    from zeroexp.zero.gathered import gathered
    from zeroexp.zero.sharded_init import sharded_init

# Public names and the module that owns each; resolved on first use: ``import zeroexp`` stays fast.
_OWNERS = {
    "Config": "zeroexp.config",
    "Engine": "zeroexp.engine",
    "initialize": "zeroexp.loop",
    "gathered": "zeroexp.zero.gathered",
    "sharded_init": "zeroexp.zero.sharded_init",
}

__all__ = ["Config", "Engine", "__version__", "gathered", "initialize", "sharded_init"]


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(importlib.import_module(_OWNERS[name]), name)
    raise AttributeError(f"module 'zeroexp' has no attribute {name!r}")


def _check_installation() -> None:
    """Stops an import of the source folder in place of the installed package.

    Python started inside a checkout finds ./zeroexp first. The folder alone has no configuration
    files and no compiled ops: those are put beside it by an installation.
    """
    if importlib.util.find_spec("zeroexp.conf") is None:
        checkout = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        raise ImportError(
            f"{checkout} is the source folder, not an installed zeroexp: it has no zeroexp.conf. "
            f"Install it in place; run:  pip install -e {checkout}"
        )


_check_installation()
