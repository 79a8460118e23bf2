"""``ZeroStrategy``: zeroexp's engine under an unchanged LightningModule.

The behaviour is written once, here and in ranks.py, steps.py and state.py, and joined with the
``ParallelStrategy`` of either Lightning namespace by :func:`strategy_class`. The module is sharded
in place: no wrapper, the same parameter names, and the optimizers stay the user's own objects.

Who does what: Lightning runs loops, hooks, callbacks and logging; the engine gathers, reduces,
    clips and steps; the
strategy carries calls from one to the other, in the order of Lightning's ``Strategy`` contract.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from zeroexp.config import Config
from zeroexp.errors import ModelError, OptimizerError
from zeroexp.strategies import callbacks, schedulers
from zeroexp.strategies import checkpoint as files
from zeroexp.strategies.compat import Namespace, namespace
from zeroexp.strategies.devices import move
from zeroexp.strategies.early import why_not_in_backward
from zeroexp.strategies.faults import Meeting, Sigterm
from zeroexp.strategies.optimization import Optimization, ZeroGrad, refuse_closures
from zeroexp.strategies.options import build_config
from zeroexp.strategies.pipe import PipedSteps, refuse_unpipeable
from zeroexp.strategies.precision import (
    PrecisionBehaviour,
    precision_class,
    refuse_unsupported,
    take_inputs_in,
    translate,
)
from zeroexp.strategies.ranks import Ranks
from zeroexp.strategies.state import State
from zeroexp.strategies.steps import Steps

if TYPE_CHECKING:
    from zeroexp.engine import Engine


class ZeroBehaviour(Ranks, Steps, State):
    """ZeRO stages 0-3 for Lightning's Trainer.

    Args:
        stage: 0 replicates everything (DDP), 1 shards the optimizer state, 2 gradients as well, 3
            parameters too.
        shard_size, unit, prefetch, overlap, reshard_after_forward, reduce, bucket: keys of the
            ``zero`` section.
        offload: where state lives between its uses: a kind (``"cpu"``, ``"nvme"``,
            ``"cpu_params"``, ``"nvme_params"``), or a mapping of keys of the ``offload`` section.
        pipeline: how the model is spread over stages: a schedule (``"1f1b"``, …), or a mapping of
            keys of the ``pipeline`` section.
        config: instead of these, a :class:`zeroexp.Config`, a mapping of its keys, or the path of
            a YAML or JSON file. Sections that are the Trainer's to decide (optim, data, …) are
            refused in mappings.
        timeout: seconds a collective waits for the slowest rank (``launch.timeout``, 300).
        process_group_backend: backend of torch.distributed; by default the device's.
        start_method: how processes are started where nobody has started them: ``popen`` runs the
            script again for each rank; ``spawn``, ``fork`` and ``forkserver`` use multiprocessing.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in
            every strategy.

    Raises:
        ConfigError: unknown or contradictory options, all of them in one report.
    """

    ns: Namespace
    lightning_module: Any
    optimizers: Any
    lr_scheduler_configs: Any
    model: Any
    _layer_sync: Any
    _lightning_optimizers: Any
    _precision_plugin: Any

    def __init__(
        self,
        stage: int | None = None,
        *,
        config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
        shard_size: int | str | None = None,
        unit: str | None = None,
        prefetch: int | None = None,
        overlap: bool | None = None,
        reshard_after_forward: str | None = None,
        reduce: str | None = None,
        bucket: int | str | None = None,
        offload: str | Mapping[str, Any] | None = None,
        pipeline: str | Mapping[str, Any] | None = None,
        timeout: float | None = None,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        zero = {
            "stage": stage,
            "shard_size": shard_size,
            "unit": unit,
            "prefetch": prefetch,
            "overlap": overlap,
            "reshard_after_forward": reshard_after_forward,
            "reduce": reduce,
            "bucket": bucket,
        }
        asked = build_config(config, zero, offload, timeout, pipeline)
        self.init_ranks(asked, process_group_backend, start_method)
        self.config = asked
        self.optimization = Optimization()
        self._meeting = Meeting()
        self._sigterm = Sigterm(self.ns)
        self._poison: BaseException | None = None
        self._input_hooks: list[Any] = []
        self._adapted: list[Any] = []
        self._late_state = None
        self._piped: PipedSteps | None = None
        self.ns.ParallelStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def __repr__(self) -> str:
        return f"<ZeroStrategy of {self.ns.name}, zero.stage={self.asked.zero.stage}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time: a pickle names the namespace instead.
        return _blank, (self.ns.name,), self.ns.ParallelStrategy.__getstate__(self)

    # ------------------------------------------------------------------ for users
    @property
    def engine(self) -> Engine:
        """The engine of the run that is going on: ledger, loss_scale, grad_norm, full_grad, …"""
        return self.optimization.engine

    def step_applied(self, optimizer: Any) -> bool:
        """Whether the last step of ``optimizer`` was applied (a non-finite one is skipped).

        For manual optimization, where ``training_step`` decides whether a scheduler advances.
        """
        return self.optimization.step_applied(optimizer)

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Inside, ``p.grad`` is the whole, unscaled gradient on every rank (a collective).

        For code that reads gradients, such as ``lightning.pytorch.utilities.grad_norm`` in
        ``on_before_optimizer_step``. Changing them changes nothing. Memory: one model in the
        gradients' dtype.
        """
        parameters = [p for p in self.lightning_module.parameters() if p.requires_grad]
        try:
            for parameter in parameters:
                gradient = self.engine.full_grad(parameter)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None

    # ------------------------------------------------------------------ precision
    @property
    def precision_plugin(self) -> Any:
        if self._precision_plugin is None:
            return self._translated(self.ns.Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else self._translated(plugin)

    def _translated(self, plugin: Any) -> Any:
        if isinstance(plugin, PrecisionBehaviour):
            return plugin
        config = translate(self.asked, plugin, self.ns).resolved()
        return precision_class(self.ns.name)(config, "cpu", self.optimization, self.ns)

    # ------------------------------------------------------------------ a run begins
    @property
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # The Trainer sets it before it asks whether the strategy takes compiled modules, which
        # Lightning allows its own strategies alone.
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ModelError(
                "Lightning takes torch.compile(LightningModule) with its own strategies only."
                " Compile the parts of the module instead, for instance `for block in self.blocks:"
                " block.compile()` in its __init__."
            )
        self.__dict__["_module"] = module

    def connect(self, model: Any) -> None:
        """Called at the start of every fit, validate, test and predict."""
        self._poison = None
        self.ns.ParallelStrategy.connect(self, model)

    def _configure_launcher(self) -> None:
        self.make_launcher(self.ns.ScriptLauncher, self.ns.SpawnLauncher)

    def setup_environment(self) -> None:
        self.check_ranks()
        self.check_folder()
        self.accelerator.setup_device(self.root_device)
        self.ns.reset_seed()
        self.start_process_group()

    def setup(self, trainer: Any) -> None:
        """Shard the module and build the engine; for fit with the optimizers, else with none."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == self.ns.TrainerFn.FITTING
        callbacks.refuse_unsupported(trainer, self.ns, piped=self.asked.pipeline.is_on)
        if self.asked.pipeline.is_on:
            refuse_unpipeable(self.lightning_module, self.ns)
        self.evaluate_under_no_grad(trainer)
        self._leave(gather=True)  # a run that ended without teardown
        if files.is_lost(self.model):
            if self._late_state is None:
                raise ModelError(
                    "an earlier run of this module failed while its parameters were spread over the"
                    " ranks, and they are gone: build the module again, or pass ckpt_path"
                )
            files.restore_shapes(self.model)
        plugin = self.precision_plugin
        self.config = self.config_here(plugin.config)
        plugin.set_formats(self.config, self.root_device.type)
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        if plugin.is_mixed:
            refuse_unsupported(self.model)
        self.model = plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self.optimization.left = None
            self.setup_optimizers(trainer)
        self.optimization.take(self._make_engine(self.model, self.optimizers if fitting else None))
        if self._late_state is not None:
            (state, strict), self._late_state = self._late_state, None
            self.engine.load_state_dict(dict(state), strict=strict)
        if plugin.is_mixed:
            self._input_hooks = take_inputs_in(self.model, plugin.compute)
        self.setup_precision_plugin()
        exact = not plugin.is_mixed and plugin.precision != "bf16-true"
        self._adapted = callbacks.adapt(trainer, self._whole, exact, self.ns)

    def setup_precision_plugin(self) -> None:
        """Nothing is left to connect: the engine has module and optimizers."""

    def _make_engine(self, module: Any, optimizers: Any) -> Engine:
        if self.config.pipeline.is_on:
            return self._make_pipe_engine(module, optimizers)
        from zeroexp.engine import Engine

        # Lightning has divided the loss by accumulate_grad_batches, and asks for clipping itself.
        return Engine(
            module,
            optimizers,
            self.config,
            device=self.root_device,
            divide_accumulation=False,
            clip=None,
            steps_at_once=why_not_in_backward(self.lightning_module, self.ns),
        )

    def _make_pipe_engine(self, module: Any, optimizers: Any) -> Engine:
        from zeroexp.pipe_engine import PipeEngine

        context = self.precision_plugin.forward_context
        self._end_piped()
        self._piped = PipedSteps(self.lightning_module, context)
        engine = PipeEngine(
            module,
            optimizers,
            self.config,
            loss=self._piped.loss,
            context=context,
            device=self.root_device,
            clip=None,
        )
        self._piped.engine = engine
        return engine

    def _end_piped(self) -> None:
        if self._piped is not None:
            self._piped.end()
        self._piped = None

    def follow_optimizers(self) -> None:
        """Build the engine anew, with its state, where a callback added parameter groups.

        Lightning's finetuning callbacks do so between epochs. Every rank comes here at the same
        batch.
        """
        if not self.optimization.groups_changed:
            return
        old = self.engine
        scalars = old.scalar_state()
        old.close(keep_sharded=self._piped is None)
        engine = self._make_engine(self.model, old.optimizers)
        engine.load_scalar_state(scalars)
        self.optimization.take(engine)

    def _whole(self, modify_rank: int | None) -> Any:
        from zeroexp import gathered

        return gathered(self.lightning_module, modify_rank=modify_rank)

    def model_to_device(self) -> None:
        fits = self.config.zero.stage < 3 and not self.config.pipeline.is_on
        move(self.model, self.root_device, fits)

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]
        try:
            self.ns.ParallelStrategy.setup_optimizers(self, trainer)
        except self.ns.MisconfigurationException as error:
            said = " ".join(str(error).split())
            raise OptimizerError(f"configure_optimizers: Lightning refuses it. {said}") from error
        if any(isinstance(optimizer, self.ns.MockOptimizer) for optimizer in self.optimizers):
            raise OptimizerError(
                "configure_optimizers returned None. Return an optimizer: fit needs one."
            )
        refuse_closures(self.optimizers)
        for wrapper in self._lightning_optimizers:
            # The wrapper is an optimizer by class, so without this its zero_grad would be torch's,
            # on p.grad.
            wrapper.zero_grad = ZeroGrad(wrapper._optimizer)
        if self.lightning_module.automatic_optimization:
            for config in self.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    self._hold(config.scheduler)

    def _hold(self, scheduler: Any) -> None:
        optimizer = scheduler.optimizer
        schedulers.hold_while(scheduler, lambda: not self.optimization.step_applied(optimizer))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around ``configure_model``: default dtype, and the meta device with ``empty_init``."""
        with ExitStack() as stack:
            if empty_init:
                stack.enter_context(torch.device("meta"))
            stack.enter_context(self.precision_plugin.tensor_init_context())
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: at stage 3 parameters are born sharded, block by block."""
        if self.asked.zero.stage < 3 or self.asked.pipeline.is_on:
            yield
            return
        from zeroexp import sharded_init

        with sharded_init(self.config_here(self.precision_plugin.config)):
            yield

    # ------------------------------------------------------------------ a run ends
    def on_exception(self, exception: BaseException) -> None:
        """From here on this rank starts no collective: the others may be somewhere else, or
        gone."""
        self._poison = exception

    def teardown(self) -> None:
        """Leave the module whole on the CPU, and the optimizers' state ready for a late
        ``save_checkpoint``."""
        self._sigterm.drop()
        callbacks.restore(self._adapted)
        for config in self.lr_scheduler_configs:
            schedulers.release(config.scheduler)
        self._leave(gather=self._poison is None or self.side.size == 1)
        module = self.lightning_module
        if module is not None:
            if self._layer_sync is not None and self.model is not None:
                self.model = self._layer_sync.revert(self.model)
            if files.is_whole(module):
                module.cpu()
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _leave(self, gather: bool) -> None:
        for handle in self._input_hooks:
            handle.remove()
        self._input_hooks = []
        self._end_piped()
        if not self.optimization.is_set_up:
            return
        engine = self.engine
        self.optimization.take(None)
        if not gather:
            engine.close(collective=False)
            return
        # What was too big to be built whole is too big to become whole.
        engine.close(keep_sharded=engine.model.born_sharded)
        if engine.optimizers:
            self.optimization.left = engine


def _blank(name: str) -> Any:
    kind = strategy_class(name)
    return kind.__new__(kind)


@cache
def strategy_class(name: str) -> Any:
    """``ZeroStrategy`` as a subclass of ``ParallelStrategy`` of the namespace ``name``.

    The same class at every call. Raises ``ValueError`` for a name that is no Lightning namespace.
    """
    ns = namespace(name)
    members = {"ns": ns, "__module__": "zeroexp.strategies", "__doc__": ZeroBehaviour.__doc__}
    bases = (ZeroBehaviour, ns.ParallelStrategy)
    return types.new_class("ZeroStrategy", bases, exec_body=lambda space: space.update(members))
