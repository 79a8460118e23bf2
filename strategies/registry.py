"""The names by which Lightning finds the strategy: ``Trainer(strategy="zeroexp_stage_3")``.

Each namespace has a registry of its own, and the strategy that a name makes belongs to that
namespace. The entries are made when the project imports Lightning, whichever comes first, and hold
no class but a way to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zeroexp.strategies.compat import NAMESPACES, namespace, when_imported

NAMES: dict[str, dict[str, Any]] = {
    "zeroexp": {},
    "zeroexp_stage_0": {"stage": 0},
    "zeroexp_stage_1": {"stage": 1},
    "zeroexp_stage_2": {"stage": 2},
    "zeroexp_stage_3": {"stage": 3},
    "zeroexp_stage_2_offload": {"stage": 2, "offload": "cpu"},
    "zeroexp_stage_3_offload": {"stage": 3, "offload": "cpu"},
    "zeroexp_stage_3_offload_nvme": {"stage": 3, "offload": "nvme"},
}

_WHAT = {
    0: "replicates everything, as DDP does",
    1: "shards the optimizer state",
    2: "shards optimizer state and gradients",
    3: "shards optimizer state, gradients and parameters",
}
_WHERE = {
    "cpu": "; optimizer state and owned gradients in host memory",
    "nvme": "; optimizer state on disk, owned gradients in host memory",
}


def _make(name: str, kind: str, **kwargs: Any) -> Any:
    from zeroexp import strategies

    make = strategies.strategy_class if kind == "trainer" else strategies.fabric_strategy_class
    return make(name)(**kwargs)


def _fill(registry: Any, name: str, kind: str) -> None:
    for registered, kwargs in NAMES.items():
        stage, offload = kwargs.get("stage", 1), kwargs.get("offload", "none")
        registry.register(
            registered,
            partial(_make, name, kind),
            description=f"ZeRO stage {stage}: {_WHAT[stage]}{_WHERE.get(offload, '')}",
            override=True,
            **kwargs,
        )


def register(name: str) -> None:
    """Enter the names into the registries of ``name`` (Trainer and Fabric) as soon as they exist.

    Raises ``ValueError`` for a name that is no Lightning namespace.
    """
    ns = namespace(name)
    trainer, fabric = (f"{ns.packages[kind]}.strategies" for kind in ("pytorch", "fabric"))
    when_imported(trainer, lambda: _fill(ns.StrategyRegistry, name, "trainer"))
    when_imported(fabric, lambda: _fill(ns.FabricRegistry, name, "fabric"))


def register_all() -> None:
    """Enter the names into every registry, now or when the project imports it."""
    for name in NAMESPACES:
        register(name)
