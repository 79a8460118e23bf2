"""``ZeroFabricStrategy``: the same engine under Lightning Fabric.

``fabric.setup(model, optimizer, …)`` shards the model in place and binds the optimizers;
``fabric.backward``, ``optimizer.step()``, ``fabric.clip_gradients``, ``fabric.no_backward_sync``,
``fabric.save`` and ``fabric.load`` are the engine's. The loss is the user's: Fabric divides
nothing by the number of micro-batches.

One model at a time, with all of its optimizers: the engine has to know them together. Setting a
    model up again ends the
engine it had.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeroexp.config import Config
from zeroexp.errors import CheckpointError, ConfigError, ModelError, OptimizerError, Problem
from zeroexp.strategies import checkpoint as files
from zeroexp.strategies.compat import Namespace, namespace
from zeroexp.strategies.optimization import (
    Optimization,
    refuse_closures,
    unwrapped,
)
from zeroexp.strategies.options import build_config
from zeroexp.strategies.precision import Formats, refuse_unsupported, take_inputs_in, translate
from zeroexp.strategies.ranks import Ranks

if TYPE_CHECKING:
    from zeroexp.engine import Engine


_NO_PIPELINE = Problem(
    "pipeline.schedule",
    "does not work with Fabric: model(batch) and fabric.backward(loss) are calls of the loop, and a"
    " pipeline runs both together.",
    "Use the Trainer with ZeroStrategy, or zeroexp.pipe_engine.PipeEngine in a loop of your own",
)


class FabricFormats(Formats):
    """Fabric's precision plugin. Fabric calls its ``convert_*`` around the model's forward."""

    def __init__(self, config: Config, device_type: str, optimization: Optimization) -> None:
        self._optimization = optimization
        self.set_formats(config, device_type)

    def pre_backward(self, tensor: Tensor, module: Any) -> None:
        """Nothing: the engine scales the loss."""

    def post_backward(self, tensor: Tensor, module: Any) -> None:
        """Nothing: the engine finishes the gradients before clipping or stepping."""

    def state_dict(self) -> dict[str, Any]:
        return self._optimization.scalar_state()


class FabricBehaviour(Ranks):
    """ZeRO stages 0-3 for Lightning Fabric; the arguments are those of ``ZeroStrategy``.

    ``precision`` is Fabric's name for ``precision_plugin``.
    """

    ns: Namespace
    checkpoint_io: Any
    is_global_zero: bool
    _precision: Any

    def __init__(
        self,
        stage: int | None = None,
        *,
        config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
        offload: str | Mapping[str, Any] | None = None,
        pipeline: str | Mapping[str, Any] | None = None,
        timeout: float | None = None,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **zero: Any,
    ) -> None:
        asked = build_config(config, {"stage": stage, **zero}, offload, timeout, pipeline)
        if asked.pipeline.is_on:
            raise ConfigError([_NO_PIPELINE])
        self.init_ranks(asked, process_group_backend, start_method)
        self.config = asked
        self.optimization = Optimization()
        self._hooks: list[Any] = []
        self.ns.FabricStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _sync_control(self.ns.name)(self.optimization)

    def __repr__(self) -> str:
        return f"<ZeroFabricStrategy of {self.ns.name}, zero.stage={self.asked.zero.stage}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.ns.name,), dict(vars(self))

    @property
    def engine(self) -> Engine:
        """The engine of the model that is set up."""
        return self.optimization.engine

    # ------------------------------------------------------------------ ranks, under Fabric's names
    def _configure_launcher(self) -> None:
        self.make_launcher(self.ns.FabricScriptLauncher, self.ns.FabricSpawnLauncher)

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def setup_environment(self) -> None:
        self.check_ranks()
        self.check_folder()
        self.accelerator.setup_device(self.root_device)
        self.start_process_group()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    # ------------------------------------------------------------------ precision
    @property
    def precision(self) -> Any:
        if self._precision is None:
            return self._translated(self.ns.FabricPrecision())
        return self._precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None if plugin is None else self._translated(plugin)

    def _translated(self, plugin: Any) -> Any:
        if isinstance(plugin, FabricFormats):
            return plugin
        config = translate(self.asked, plugin, self.ns, fabric=True).resolved()
        return _precision_class(self.ns.name)(config, "cpu", self.optimization)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.root_device)
        stack.enter_context(self.precision.tensor_init_context())
        return stack

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Around the construction of a model: on the CPU, since the engine allocates the shards."""
        return torch.device("meta") if empty_init else self.precision.module_init_context()

    # ------------------------------------------------------------------ set up
    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model without optimizers: for evaluation."""
        return self._shard(module, None)

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise OptimizerError(
            "ZeroFabricStrategy needs a model and its optimizers together: model, optimizer ="
            " fabric.setup(model, optimizer)"
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, ...]:
        ready = self._shard(module, optimizers), optimizers
        return (*ready, scheduler) if self.ns.fabric_takes_a_scheduler else ready

    def _shard(self, module: nn.Module, optimizers: list[Any] | None) -> nn.Module:
        from zeroexp.engine import Engine

        if self.optimization.is_set_up and self.engine.module is not module:
            raise ModelError(
                "ZeroFabricStrategy has one model at a time; this Fabric object has set up another"
                " one. Use a second Fabric object, or put both into one module."
            )
        self._leave()
        refuse_closures(optimizers or [])
        plugin = self.precision
        self.config = self.config_here(plugin.config)
        plugin.set_formats(self.config, self.root_device.type)
        if plugin.is_mixed:
            refuse_unsupported(module)
        engine = Engine(
            module,
            optimizers,
            self.config,
            device=self.root_device,
            divide_accumulation=False,
            clip=None,
            steps_at_once="with Fabric the loop is yours: it may clip, or not step, after backward",
        )
        self.optimization.take(engine)
        if plugin.is_mixed:
            self._hooks = take_inputs_in(module, plugin.compute)
        return module

    def _leave(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self.optimization.is_set_up:
            engine = self.engine
            self.optimization.take(None)
            engine.close(keep_sharded=engine.model.born_sharded)

    # ------------------------------------------------------------------ training
    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        self.optimization.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.pop("closure", None)
        result = closure() if closure is not None else None
        self.optimization.step(optimizer, **kwargs)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the global L2 norm; returns the norm before.

        A non-finite norm is for ``precision.nonfinite`` to decide, at the step.
        """
        if float(norm_type) != 2.0:
            raise OptimizerError(f"clip_gradients: norm_type={norm_type} is not supported, only 2")
        return torch.tensor(self.optimization.clip_norm(optimizer, float(max_norm)))

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Any, clip_val: float | int
    ) -> None:
        self.optimization.clip_value(optimizer, float(clip_val))

    # ------------------------------------------------------------------ state
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        if self.optimization.is_set_up and module is self.engine.module:
            return self.engine.state_dict()
        files.refuse_shares(module)
        return module.state_dict() if self.is_global_zero else {}

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        if self.optimization.is_set_up and module is self.engine.module:
            self.engine.load_state_dict(state_dict, strict=strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = unwrapped(optimizer)
        engine = self.optimization.engine_of(optimizer)
        if engine is not None:
            return engine.optimizer_state_dict(optimizer)
        state: dict[str, Any] = optimizer.state_dict() if self.is_global_zero else {}
        return state

    def save_checkpoint(
        self,
        path: str | PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """One file with whole tensors, loss scale and counters, written by rank 0."""
        path = self.broadcast(path)
        whole = self._convert_stateful_objects_in_state(state, filter=filter or {})  # type: ignore[attr-defined]
        whole[_SCALARS] = self.optimization.scalar_state()
        problem = None
        if self.is_global_zero:
            problem = files.write(self.checkpoint_io.save_checkpoint, whole, path, storage_options)
        problem = self.broadcast(problem)
        if problem is not None:
            raise CheckpointError(f"rank 0 could not write {path}: {problem}")

    def load_checkpoint(
        self,
        path: str | PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore the objects in ``state``; returns what is left of the file."""
        found = files.read(self.broadcast(path), weights_only, self.ns)
        scalars = found.pop(_SCALARS, None)
        if not state:
            return found
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, found, strict=strict)
            return {}
        if isinstance(state, torch.optim.Optimizer):
            self._load_optimizer(state, found)
            return {}
        missing = [key for key in state if key not in found]
        if strict and missing:
            raise CheckpointError(
                f"{path} has no {missing[0]!r}; it has {', '.join(map(repr, found))}. strict=False"
                " skips it."
            )
        for key, value in list(state.items()):
            if key in found:
                self._restore(state, key, value, found.pop(key), strict)
        if scalars and self.optimization.is_set_up:
            self.optimization.load_scalar_state(scalars)
        return found

    def _restore(
        self, state: dict[str, Any], key: str, value: Any, saved: Any, strict: bool
    ) -> None:
        if isinstance(value, nn.Module):
            self.load_module_state_dict(value, saved, strict=strict)
        elif isinstance(value, torch.optim.Optimizer):
            self._load_optimizer(value, saved)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(saved)
        else:
            state[key] = saved

    def _load_optimizer(self, optimizer: Any, saved: dict[str, Any]) -> None:
        optimizer = unwrapped(optimizer)
        engine = self.optimization.engine_of(optimizer)
        if engine is not None:
            engine.load_optimizer_state_dict(optimizer, saved)
        else:
            optimizer.load_state_dict(saved)

    def teardown(self) -> None:
        self._leave()
        self.ns.FabricStrategy.teardown(self)


_SCALARS = "zeroexp"


class _SyncControl:
    """``fabric.no_backward_sync``: backward passes inside are accumulating micro-batches."""

    def __init__(self, optimization: Optimization) -> None:
        self._optimization = optimization

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
        return self._optimization.blocked() if enabled else nullcontext()


def _blank(name: str) -> Any:
    kind = fabric_strategy_class(name)
    return kind.__new__(kind)


@cache
def _sync_control(name: str) -> Any:
    base = namespace(name).BackwardSyncControl
    return types.new_class("SyncControl", (_SyncControl, base))


@cache
def _precision_class(name: str) -> Any:
    return types.new_class("ZeroFabricPrecision", (FabricFormats, namespace(name).FabricPrecision))


@cache
def fabric_strategy_class(name: str) -> Any:
    """``ZeroFabricStrategy`` as a subclass of Fabric's ``ParallelStrategy`` of the namespace
    ``name``.

    Raises ``ValueError`` for a name that is no Lightning namespace.
    """
    ns = namespace(name)
    members = {"ns": ns, "__module__": "zeroexp.strategies", "__doc__": FabricBehaviour.__doc__}
    bases = (FabricBehaviour, ns.FabricStrategy)
    return types.new_class(
        "ZeroFabricStrategy", bases, exec_body=lambda space: space.update(members)
    )
