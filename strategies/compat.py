"""Everything zeroexp takes from Lightning, private names included, in one place.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names: two class trees,
two registries. A :class:`Namespace` is one of them. Nothing else in this package imports from
Lightning, so a new Lightning version is a change of this file (and a test asks both namespaces for
every name in the table).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

__all__ = [
    "NAMESPACES",
    "OPTIONAL",
    "TABLE",
    "Namespace",
    "default_namespace",
    "namespace",
    "when_imported",
]

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

# attribute of Namespace -> (package, module below it, name there)
TABLE: dict[str, tuple[str, str, str]] = {
    # public
    "Trainer": ("pytorch", "", "Trainer"),
    "LightningModule": ("pytorch", "", "LightningModule"),
    "Callback": ("pytorch", "callbacks", "Callback"),
    "ParallelStrategy": ("pytorch", "strategies", "ParallelStrategy"),
    "StrategyRegistry": ("pytorch", "strategies", "StrategyRegistry"),
    "Precision": ("pytorch", "plugins", "Precision"),
    "MixedPrecision": ("pytorch", "plugins", "MixedPrecision"),
    "HalfPrecision": ("pytorch", "plugins", "HalfPrecision"),
    "DoublePrecision": ("pytorch", "plugins", "DoublePrecision"),
    "TorchCheckpointIO": ("pytorch", "plugins", "TorchCheckpointIO"),
    "TrainerFn": ("pytorch", "trainer.states", "TrainerFn"),
    "TrainerStatus": ("pytorch", "trainer.states", "TrainerStatus"),
    "SIGTERMException": ("pytorch", "utilities.exceptions", "SIGTERMException"),
    "is_overridden": ("pytorch", "utilities.model_helpers", "is_overridden"),
    "MisconfigurationException": (
        "fabric",
        "utilities.exceptions",
        "MisconfigurationException",
    ),
    "rank_zero_only": ("pytorch", "utilities.rank_zero", "rank_zero_only"),
    "rank_zero_info": ("pytorch", "utilities.rank_zero", "rank_zero_info"),
    "rank_zero_warn": ("pytorch", "utilities.rank_zero", "rank_zero_warn"),
    "StochasticWeightAveraging": ("pytorch", "callbacks", "StochasticWeightAveraging"),
    "WeightAveraging": ("pytorch", "callbacks", "WeightAveraging"),
    "ModelPruning": ("pytorch", "callbacks", "ModelPruning"),
    "BaseFinetuning": ("pytorch", "callbacks", "BaseFinetuning"),
    "SLURMEnvironment": ("fabric", "plugins.environments", "SLURMEnvironment"),
    "FabricStrategy": ("fabric", "strategies", "ParallelStrategy"),
    "FabricRegistry": ("fabric", "strategies", "STRATEGY_REGISTRY"),
    "FabricPrecision": ("fabric", "plugins", "Precision"),
    "FabricMixedPrecision": ("fabric", "plugins", "MixedPrecision"),
    "FabricHalfPrecision": ("fabric", "plugins", "HalfPrecision"),
    "FabricDoublePrecision": ("fabric", "plugins", "DoublePrecision"),
    "fabric_rank_zero_only": ("fabric", "utilities.rank_zero", "rank_zero_only"),
    # private
    "LightningOptimizer": ("pytorch", "core.optimizer", "LightningOptimizer"),
    "MockOptimizer": ("pytorch", "core.optimizer", "_MockOptimizer"),
    "ScriptLauncher": ("pytorch", "strategies.launchers", "_SubprocessScriptLauncher"),
    "SpawnLauncher": ("pytorch", "strategies.launchers", "_MultiProcessingLauncher"),
    "FabricScriptLauncher": ("fabric", "strategies.launchers", "_SubprocessScriptLauncher"),
    "FabricSpawnLauncher": ("fabric", "strategies.launchers", "_MultiProcessingLauncher"),
    "HandlersCompose": ("pytorch", "trainer.connectors.signal_connector", "_HandlersCompose"),
    "SignalConnector": ("pytorch", "trainer.connectors.signal_connector", "_SignalConnector"),
    "init_dist_connection": ("fabric", "utilities.distributed", "_init_dist_connection"),
    "backend_for": (
        "fabric",
        "utilities.distributed",
        "_get_default_process_group_backend_for_device",
    ),
    "reset_seed": ("fabric", "utilities.seed", "reset_seed"),
    "BackwardSyncControl": ("fabric", "strategies.strategy", "_BackwardSyncControl"),
    "Sharded": ("fabric", "strategies.strategy", "_Sharded"),
    "FabricModule": ("fabric", "wrappers", "_FabricModule"),
    "load_file": ("fabric", "utilities.cloud_io", "_load"),
    "is_local": ("fabric", "utilities.cloud_io", "_is_local_file_protocol"),
}

# Not in every supported version: the attribute is None where it is missing.
OPTIONAL = frozenset({"WeightAveraging"})


class Namespace:
    """One of the two Lightning class trees; the attributes are the keys of :data:`TABLE`."""

    def __init__(self, name: str) -> None:
        if name not in NAMESPACES:
            known = " and ".join(NAMESPACES)
            raise ValueError(f"{name!r} is no Lightning namespace; known are {known}")
        self.name = name
        self.packages = {"pytorch": name, "fabric": _FABRIC[name]}

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in TABLE:
            raise AttributeError(f"Namespace has no attribute {attribute!r}")
        package, below, name = TABLE[attribute]
        path = ".".join(filter(None, (self.packages[package], below)))
        module = importlib.import_module(path)
        found = getattr(module, name, None) if attribute in OPTIONAL else getattr(module, name)
        self.__dict__[attribute] = found
        return found

    @property
    def fabric_takes_a_scheduler(self) -> bool:
        """Whether Fabric hands a scheduler through ``setup_module_and_optimizers`` (since 2.6)."""
        setup = self.FabricStrategy.setup_module_and_optimizers
        return "scheduler" in inspect.signature(setup).parameters

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return namespace, (self.name,)


@cache
def namespace(name: str) -> Namespace:
    """The namespace called ``name``; nothing of Lightning is imported before it is used.

    Raises ``ValueError`` for a name that is not in :data:`NAMESPACES`.
    """
    return Namespace(name)


def _root(name: str) -> str:
    return name.partition(".")[0]


def default_namespace() -> str:
    """The namespace the project uses: the one it has imported, else the first that is installed.

    Where both are imported it is ``lightning.pytorch``; ask for the other one by name.
    Raises ``ModuleNotFoundError`` when neither is installed.
    """
    for name in NAMESPACES:
        if name in sys.modules:
            return name
    # The top-level package only: find_spec of a dotted name would import its parents.
    for name in NAMESPACES:
        if importlib.util.find_spec(_root(name)) is not None:
            return name
    raise ModuleNotFoundError(
        "neither lightning nor pytorch_lightning is installed; run: pip install 'lightning>=2.5'"
    )


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls back once right after a module was imported for the first time."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        callback = self.waiting.pop(fullname, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback()

        # The loader belongs to this one module, so replacing its method touches no other import.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_on_import = _OnImport()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` now if ``module`` is imported already, else right after it is."""
    if module in sys.modules:
        callback()
        return
    _on_import.waiting[module] = callback
    if _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)
