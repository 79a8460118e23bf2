"""The training loop's other half: forward scope, backward, one boundary, one step, over any
placement of state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.checkpoint import directory, full_model, full_optimizer
from zeroexp.checkpoint.across import note_of_rank_0
from zeroexp.comm import World
from zeroexp.comm.pool import BufferPool
from zeroexp.comm.ranks import with_ranks
from zeroexp.config import Config
from zeroexp.errors import FileError, ModelError, OptimizerError, SwapError
from zeroexp.layout import Layout
from zeroexp.ledger import STATE_KINDS, Ledger
from zeroexp.optim.face import Collect, Face, state_left_behind
from zeroexp.optim.groups import group_numbers
from zeroexp.placement import Tier, place
from zeroexp.precision import LossScale, Policy
from zeroexp.tiers import border_of
from zeroexp.zero.attachment import Attachment
from zeroexp.zero.backward import Backward
from zeroexp.zero.boundary import Boundary
from zeroexp.zero.buffer import SparePages
from zeroexp.zero.companion import companions
from zeroexp.zero.delayed import DelayedSteps
from zeroexp.zero.disk import disk_for
from zeroexp.zero.early import EarlyStep, early_step
from zeroexp.zero.hooks import Hooks
from zeroexp.zero.marked import MarkedResidency
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.parked import Parked
from zeroexp.zero.part import Part
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.residency import Residency
from zeroexp.zero.stepper import Stepper
from zeroexp.zero.surroundings import Surroundings
from zeroexp.zero.ties import Ties
from zeroexp.zero.unit import Life, UnitState
from zeroexp.zero.window import Window

_LOG = logging.getLogger("zeroexp")


class Engine:
    """Shards ``module`` in place and trains it with the user's own ``optimizers``.

    Parameter names and objects stay; gradients live in the engine (``param.grad`` is ``None`` after
    a backward, see :meth:`full_grad`). Every rank must build the engine at the same point.
    ``config`` is a :class:`Config` or a partial mapping of it. ``divide_accumulation=False``: the
    caller divides the loss by the number of micro-batches itself. ``clip=None``: the caller clips
    by itself; by default :meth:`step` clips to ``trainer.gradient_clip_val``.
    ``steps_at_once``: why no part of a step may be made in backward, if the caller knows a reason.
    ``part``: what of the module the ranks of this data-parallel group hold (all of it).

    Raises :class:`ModelError`, :class:`OptimizerError`, :class:`RankMismatch` or
    :class:`ConfigError`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] | None,
        config: Config | Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
        divide_accumulation: bool = True,
        clip: float | str | None = "config",
        steps_at_once: str | None = None,
        part: Part | None = None,
    ) -> None:
        if not isinstance(config, Config):
            config = Config.from_mapping(with_ranks(config or {}))
        self.config = config.resolved()
        self.module = module
        self.optimizers = _as_list(optimizers)
        self.device = torch.device(device) if device is not None else device_of(module)
        self.ledger = Ledger()
        self.policy = Policy.from_config(self.config)
        zero = self.config.zero
        shard_size = zero.shard_size if isinstance(zero.shard_size, int) else None
        if zero.shard_size == "node":
            shard_size = self.config.node_data_ranks
        self.world = World.create(
            self.ledger,
            shard_size=shard_size,
            timeout=float(self.config.launch.timeout),
            parts=part.count if part is not None else 1,
        )
        self.rank, self.world_size = self.world.rank, self.world.size
        self.companions = companions(module)
        """What kinds of modules in the model need of who trains them."""
        for companion in self.companions:
            companion.join(self.world)
        # An engine that is dropped without close() must not leave its threads behind.
        self._drop_threads = weakref.finalize(self, self.world.close)
        offload = self.config.offload
        placement = place(zero.stage, optim=Tier(offload.optim), params=Tier(offload.params))
        first_group, groups = group_numbers(module, self.optimizers)
        self.disk = disk_for(self.config, placement, self.ledger, self.optimizers, self.rank)
        """Its files, where any state is on the nvme tier."""
        self._around = Surroundings(
            self.world,
            self.ledger,
            placement,
            self.policy,
            BufferPool(self.device, self.ledger, "gradients"),
            SparePages(self.ledger),
            border_of(self.device),
            self.device,
            zero.bucket,
            fraction=offload.fraction,
            delayed=offload.delayed_update,
            disk=self.disk,
        )
        self.model = ShardedModel(module, groups, self._around, cut=zero.unit, part=part)
        root = next((u for u in self.model.units if u.name == ""), None)
        reshard = zero.reshard_after_forward
        self.residency = (Residency if part is None else MarkedResidency)(
            self.model.units,
            self._around,
            prefetch=zero.prefetch if zero.overlap else 0,
            keeps=lambda unit: reshard == "false" or (reshard == "auto" and unit is root),
            root=root,
        )
        self.reducer = Reducer(
            self._units_with_gradients(),
            overlap=zero.overlap,
            before_wait=self.residency.offer_rest,
            after=self._reduced,
        )
        self.steppers: list[Stepper] = []
        self._early: EarlyStep | None = None
        for optimizer, first in zip(self.optimizers, first_group, strict=True):
            left_behind = state_left_behind(optimizer)
            stepper = Stepper(
                self._bind(optimizer), self.model.trainable_segments, first, self._around
            )
            stepper.refuse_cut(self.model.shares)
            self._take_over_state(stepper, left_behind)
            self.steppers.append(stepper)
        scale = self.config.precision.loss_scale
        self.scale = LossScale(
            scale, dynamic=scale.mode == "dynamic", active=scale.mode in ("dynamic", "static")
        )
        each = zero.reduce == "each" or (zero.reduce == "auto" and placement.grads.sharded)
        self._window = Window(
            self.scale,
            accumulate=config.trainer.accumulate_grad_batches,
            reduce_each=each,
            divides=divide_accumulation,
        )
        self._delayed = DelayedSteps(self.steppers if offload.delayed_update else (), self._around)
        self.model.before_edit = self._delayed.publish
        limit = config.trainer.gradient_clip_val if clip == "config" else clip
        self._early = early_step(
            self.config,
            self.steppers,
            self._window,
            self._around,
            self.reducer.following,
            reason=steps_at_once if limit is None else "gradients are clipped",
        )
        this = weakref.proxy(self)  # what is parked is known to the model, which outlives an engine
        self._parked = Parked(
            self.model,
            self.steppers,
            self._delayed,
            self._early,
            self.config,
            lambda: this._why_in_use(),
        )
        self.model.before_whole = self._parked.reload
        self._boundary = Boundary(
            self.model,
            self.residency,
            self.reducer,
            self._window,
            self.scale,
            self.policy,
            self.steppers,
            clip=None if limit is None else float(limit),
            early=self._early,
            delayed=self._delayed,
            ties=Ties(self.model, part, self.reducer) if part is not None else None,
        )
        self._backward = Backward(
            self.residency,
            self.reducer,
            self._window,
            ranks=self.world_size,
            may_begin=self._backward_may_begin,
            begins=self._boundary.reopen,
        )
        hooks = Hooks(
            self.residency,
            self.reducer,
            self._backward.walk_begins,
            self._backward.gradient_arrives,
        )
        self._attachment = Attachment(self.model, self.residency, hooks, root, self._forward_begins)
        if self.rank == 0 and self.optimizers:
            for companion in self.companions:
                for warning in companion.warnings(groups):
                    _LOG.warning("%s", warning)
        self._closed = self._warned = False
        self.scheduler: Any = None
        """A learning-rate scheduler that :meth:`step` advances after each applied step, if set."""

    # -- construction ------------------------------------------------------------------------------

    def _reduced(self, unit: UnitState) -> None:
        if self._early is not None:
            self._early.reduced(unit)

    def _bind(self, optimizer: Optimizer) -> Face:
        this = weakref.proxy(self)
        return Face(
            optimizer,
            on_step=lambda: this.step(optimizer),
            on_zero_grad=lambda: this.zero_grad(optimizer),
        )

    def _take_over_state(self, stepper: Stepper, left_behind: Collect | None) -> None:
        """State that the optimizer has already (loaded from a torch checkpoint, or of an earlier
        engine) goes on; rank 0's counts."""
        optimizer = stepper.optimizer
        given: Mapping[str, Any] = {}
        if left_behind is not None:
            given = left_behind(everywhere=False)
        elif self.rank == 0 and optimizer.state:
            given = type(optimizer).state_dict(optimizer)
        has_state = bool(given.get("state"))
        if note_of_rank_0(self.world, has_state, "take-over of optimizer state"):
            full_optimizer.load_optimizer_state(self.model, stepper, given)
        optimizer.state.clear()

    def _units_with_gradients(self) -> list[UnitState]:
        """In the order in which a plain backward completes them."""
        return [u for u in reversed(self.model.units) if u.trainable_segments]

    def _forward_begins(self) -> None:
        """A pass starts: parameters that the user unfroze since the last one get gradients and
        optimizer state."""
        self._parked.need("a forward", "params")
        if torch._C._current_graph_task_id() == -1:
            self._backward.end_failed_walk()
        fresh = self.model.thaw()
        if not fresh:
            return
        self._attachment.follow(fresh)
        for stepper in self.steppers:
            stepper.adopt(fresh)
        self.reducer.set_units(self._units_with_gradients())

    def _backward_may_begin(self) -> None:
        steps = ("optim",) if self._early is not None else ()  # units are stepped in it
        self._parked.need("a backward", "params", "grads", *steps)

    @property
    def layout(self) -> Layout:
        """Which bytes of which parameter lie where."""
        return self.model.layout

    @property
    def arrangement(self) -> dict[str, Any] | None:
        """How the module is spread over ranks that hold different parts of it; None where every
        rank trains all of it. JSON can hold it."""
        return None

    # -- forward -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Floating inputs are cast to the compute dtype."""
        return self.module(*self.cast(args), **self.cast(kwargs))

    def cast(self, value: Any) -> Any:
        """``value`` with its floating tensors in the compute dtype, where that is a narrow one."""
        dtype = self.policy.compute
        if dtype == torch.float32:
            return value
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {k: self.cast(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self.cast(v) for v in value)
        return value

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around code that uses parts of the module without calling the root (Lightning's
        ``training_step``)."""
        self._forward_begins()
        self.residency.enter_scope()
        failed = True
        try:
            self.residency.need_root()
            yield
            failed = False
        finally:
            self.residency.exit_scope(failed)

    # -- backward ----------------------------------------------------------------------------------

    @property
    def accumulate(self) -> int:
        """Micro-batches per step, for the plain loop; may be changed between steps."""
        return self._window.accumulate

    @accumulate.setter
    def accumulate(self, parts: int) -> None:
        self._window.accumulate = parts

    @property
    def loss_scale(self) -> float:
        """Factor on the loss of the next backward."""
        return self._window.loss_scale

    def backward(
        self,
        loss: Tensor,
        *,
        last: bool | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Accumulate the gradients of a scalar ``loss``, scaled by :attr:`loss_scale`.

        ``last=False`` marks a micro-batch after which no step follows; by default every
        ``accumulate``-th is the last. Raises :class:`ModelError` when ``loss`` is not a scalar or
        has no graph.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"the loss must be a scalar tensor, got {shape}; reduce it with .mean() or .sum()"
            )
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on any trainable parameter: it has no graph. Is it "
                "detached, computed under torch.no_grad(), or is everything frozen?"
            )
        self._window.saw_loss(loss)
        with self.backward_scope(last=last):
            self.scaled(loss).backward(retain_graph=retain_graph, create_graph=create_graph)

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times :attr:`loss_scale`, for code that calls ``.backward()`` itself."""
        return loss * self.loss_scale if self.loss_scale != 1.0 else loss

    @contextmanager
    def backward_scope(
        self, *, last: bool | None = None, units: Sequence[UnitState] | None = None
    ) -> Iterator[None]:
        """Around one call of autograd; what it leaves behind is reduced when it ends. ``units``:
        the only ones that it reaches, on every rank."""
        with self._backward.scope(last, units):
            yield

    # -- boundary ----------------------------------------------------------------------------------

    def _chosen(self, optimizer: Optimizer | None) -> list[Stepper]:
        if optimizer is None:
            return self.steppers
        found = [s for s in self.steppers if s.optimizer is optimizer]
        if not found:
            raise OptimizerError(
                "this optimizer was not given to the engine; pass it to zeroexp.initialize()"
            )
        return found

    def finish_gradients(self, optimizer: Optimizer | None = None) -> bool:
        """Reduce what is left, agree with the other ranks, measure the norm. True when all
        gradients are finite.

        Idempotent until the next backward, step or ``zero_grad``.
        """
        self._parked.need("finish_gradients()", "grads")
        return all(self._boundary.finish(s).finite for s in self._chosen(optimizer))

    def clip_norm(self, max_norm: float, optimizer: Optimizer | None = None) -> float:
        """Scale the gradients down to a global L2 norm of ``max_norm``; returns the norm before
        (torch's ``clip_grad_norm_``, with its 1e-6)."""
        self._parked.need("clip_norm()", "grads")
        return self._boundary.clip_norm(max_norm, self._chosen(optimizer))

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        """Clamp every element of the unscaled gradients to ``[-limit, limit]``."""
        self._parked.need("clip_value()", "grads")
        self._boundary.clip_value(limit, self._chosen(optimizer))

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """Apply the accumulated gradients. True if they were applied.

        In the plain loop this does nothing until ``accumulate`` backwards have been made. A step
        with a non-finite gradient is skipped, applied or an error, as ``precision.nonfinite`` says;
        all ranks do the same. Raises :class:`NonFiniteError`.
        """
        if not self._window.complete:
            return False
        self._parked.need("a step", *STATE_KINDS)
        applied = self._boundary.step(self._chosen(optimizer))
        for companion in self.companions if applied else ():
            companion.after_step(self.world.control, self.world.pipe)
        if applied and self.scheduler is not None:
            self.scheduler.step()
        self.ledger.mark_step()
        if self.disk is not None:
            self.disk.traffic.mark_step()
        return applied

    def zero_grad(self, optimizer: Optimizer | None = None) -> None:
        """Forget accumulated gradients (of one optimizer, or all)."""
        self._parked.need("zero_grad()", "grads")
        self._backward.end_failed_walk()
        if self._window.unfinished and not self._warned and self.rank == 0:
            self._warned = True
            _LOG.warning(
                "zero_grad() dropped %d of %d micro-batches of a step: with "
                "trainer.accumulate_grad_batches, call it after step() returned True, or never",
                self._window.micro_steps,
                self._window.accumulate,
            )
        if self.reducer.interrupted:
            self.reducer.abandon()
        self._boundary.forget(self._chosen(optimizer))
        self._window.restart()

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """The whole reduced gradient of ``param`` in fp32, unscaled, or ``None`` if no rank has one
        (collective)."""
        place = self.model.place.get(id(param))
        if place is None:
            raise ModelError("this parameter does not belong to the engine's module")
        _, segment, slot = place
        stepper = next((s for s in self.steppers if segment in s.segments), None)
        if stepper is None:
            return None
        self._parked.need("full_grad()", "grads")
        return self._boundary.full_grad(segment, slot, stepper)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the last gradients, unscaled, before clipping; ``None`` before the
        first boundary."""
        return self._boundary.grad_norm

    @property
    def grad_norm_clipped(self) -> float | None:
        """The same after clipping."""
        return self._boundary.grad_norm_clipped

    @property
    def global_steps(self) -> int:
        """Boundaries passed, skipped ones included."""
        return self._boundary.steps

    @property
    def skipped_steps(self) -> int:
        """Boundaries at which no step was applied because a gradient was not finite."""
        return self._boundary.skipped

    # -- state -------------------------------------------------------------------------------------

    def _open_state(self) -> None:
        """State is read or replaced as a whole: also after close(), and if it is away."""
        self.world.open()
        self._parked.reload()

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters (floats in fp32) and buffers by name, on the CPU of rank 0; empty
        elsewhere (collective)."""
        self._open_state()
        self._delayed.wait()
        return full_model.model_state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Set parameters and buffers from rank 0's ``state`` (collective). Raises
        :class:`CheckpointError`."""
        self._open_state()
        self._backward.end_failed_walk()
        self._boundary.give_up_begun()
        self._delayed.publish()
        full_model.load_model_state(self.model, state, strict=strict)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state in torch's own format with whole tensors, on rank 0; empty
        elsewhere (collective)."""
        self._open_state()
        self._delayed.wait()
        return full_optimizer.optimizer_state(self.model, self._chosen(optimizer)[0])

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Set the optimizer's state from rank 0's ``state`` (collective). Raises
        :class:`CheckpointError`."""
        self._open_state()
        self._delayed.publish()
        full_optimizer.load_optimizer_state(self.model, self._chosen(optimizer)[0], state)

    def offload_states(self, include: Iterable[str] | None = None, to: str = "cpu") -> None:
        """Free the memory of state that is not needed for a while: those kinds of ``params``,
        ``grads`` and ``optim`` that are in ``include`` (all), until :meth:`reload_states`.

        ``to``: ``cpu`` (from an accelerator to host memory) or ``nvme`` (files below
        ``offload.nvme.dir``); what is on that tier already stays. Not collective; between a step
        and the next forward, or between two micro-batches. What needs state that is away is
        refused; what reads or replaces it for a checkpoint, and :meth:`close`, reload it first.
        Raises :class:`ModelError`, :class:`FileError` or :class:`ConfigError`, and then has changed
        nothing.
        """
        self._parked.park(include, to)

    def reload_states(self) -> None:
        """Bring back what :meth:`offload_states` moved, bit by bit, in place (not collective).

        Raises :class:`FileError` or :class:`SwapError`: what could not be read stays away, no part
        of it is used, and it can be asked for again.
        """
        self._parked.reload()

    @contextmanager
    def offloaded(self, *kinds: str, to: str = "cpu") -> Iterator[None]:
        """:meth:`offload_states` of ``kinds`` (all) inside; what was not away before is reloaded at
        the end, also of a block that raises."""
        fresh = self._parked.park(kinds or None, to)
        try:
            yield
        finally:
            self._parked.reload(fresh)

    def _why_in_use(self) -> str:
        """Why state cannot leave now; empty where it can."""
        self._backward.end_failed_walk()
        if self.residency.active or torch._C._current_graph_task_id() != -1:
            return "inside a forward or backward: do it between a step and the next forward"
        if self.reducer.interrupted:
            return "after a backward that failed: call zero_grad() first"
        return "after close()" if self._closed else ""

    def scalar_state(self) -> dict[str, Any]:
        """Counters and loss scale: what resume needs beside model and optimizers."""
        return {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scale.state_dict(),
        }

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`scalar_state`."""
        self._boundary.steps = int(state["global_steps"])
        self._boundary.skipped = int(state["skipped_steps"])
        self.scale.load_state_dict(dict(state["loss_scale"]))

    def save_checkpoint(self, path: str | Path) -> None:
        """Write whole model and optimizer state (safetensors and JSON), complete or not at all
        (collective)."""
        directory.save(self, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Resume from :meth:`save_checkpoint`, at any number of ranks and any stage (collective).

        Raises ``FileNotFoundError`` or :class:`CheckpointError`.
        """
        directory.load(self, Path(path))

    def close(self, collective: bool = True, *, keep_sharded: bool = False) -> None:
        """End the engine's work on the module: parameters become whole and ordinary again.

        Optimizers keep their state: what lies sharded here becomes whole when they are used again.
        ``collective=False`` gathers nothing, for a rank that failed and must not wait for the
        others: sharded parameters then have no values. ``keep_sharded=True`` leaves sharded
        parameters so, for a model that does not fit: the module goes on working as before, on all
        ranks together, until another engine takes it over. State can still be saved afterwards.
        """
        if self._closed:
            return
        try:
            self._parked.reload()
        except (FileError, SwapError) as error:
            if collective:
                raise
            _LOG.warning("the engine ends without the state that was offloaded: %s", error)
        self._closed = True
        if collective:
            self._delayed.publish()
        self._delayed.close()
        if self._early is not None:
            if self._early.begun:
                _LOG.warning(
                    "the engine ends between a backward and its step, a part of which was made in "
                    "backward: weights are between two steps (offload.step_in_backward)"
                )
            if collective:
                self._early.end()
            self._early.close()
        if self.disk is not None and collective:
            self.disk.flush()  # what goes wrong with the last bytes is an error now
        for stepper in self.steppers:
            stepper.face.retire(self._collector(stepper) if collective else _lost)
        if not collective:
            self._attachment.remove()
            return
        self.residency.release_all()
        if keep_sharded and self.residency.gathers:
            self._drop_threads.detach()
            self._attachment.hand_over()
            return
        self._attachment.remove()
        for unit in self.model.units:
            if unit.transient and unit.life is Life.SHARDED:
                unit.gather()
            unit.wait()
            unit.pins += 1
        self.world.settle()
        self.model.fetch_elsewhere()
        self.world.close()

    def _collector(self, stepper: Stepper) -> Collect:
        model, world = self.model, self.world  # not the engine: an optimizer may outlive it

        def collect(*, everywhere: bool) -> Mapping[str, Any]:
            closed = world.closed
            world.open()
            try:
                return full_optimizer.optimizer_state(model, stepper, everywhere=everywhere)
            finally:
                if closed:
                    world.close()

        return collect


def _lost(*, everywhere: bool) -> Mapping[str, Any]:
    raise OptimizerError(
        "this optimizer's state was lost with a zeroexp engine that ended after a failure; build a "
        "new optimizer, or load a checkpoint"
    )


def _as_list(optimizers: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def device_of(module: nn.Module) -> torch.device:
    """Where its parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
