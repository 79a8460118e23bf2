"""The Lightning side of zeroexp.

Importing this package imports neither Lightning nor torch. It enters the strategy names
(``Trainer(strategy="zeroexp_stage_3")``) into Lightning's registries, now or as soon as the
project imports Lightning.

``ZeroStrategy`` belongs to the Lightning that the project uses: ``lightning.pytorch`` or
    ``pytorch_lightning``, whichever is
imported already, or else installed. Where both are imported, it is ``lightning.pytorch``, and
``strategy_class("pytorch_lightning")`` is the other one; the registered names always make the
right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroexp.strategies.compat import default_namespace
from zeroexp.strategies.registry import register, register_all

if TYPE_CHECKING:
    from zeroexp.strategies.fabric import FabricBehaviour as ZeroFabricStrategy
    from zeroexp.strategies.strategy import ZeroBehaviour as ZeroStrategy

__all__ = [
    "ZeroFabricStrategy",
    "ZeroStrategy",
    "fabric_strategy_class",
    "register",
    "strategy_class",
]

register_all()


def strategy_class(name: str) -> Any:
    """The Trainer's ``ZeroStrategy`` of the Lightning namespace ``name``."""
    from zeroexp.strategies import strategy

    return strategy.strategy_class(name)


def fabric_strategy_class(name: str) -> Any:
    """Fabric's ``ZeroFabricStrategy`` of the Lightning namespace ``name``."""
    from zeroexp.strategies import fabric

    return fabric.fabric_strategy_class(name)


def __getattr__(name: str) -> Any:
    if name == "ZeroStrategy":
        return strategy_class(default_namespace())
    if name == "ZeroFabricStrategy":
        return fabric_strategy_class(default_namespace())
    raise AttributeError(f"module 'zeroexp.strategies' has no attribute {name!r}")
