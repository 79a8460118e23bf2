"""The training loop's other half: forward scope, backward, one boundary, one step, over any
placement of state."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from zeroexp.checkpoint import directory, full
from zeroexp.comm import World
from zeroexp.comm.pool import BufferPool
from zeroexp.comm.ranks import with_ranks
from zeroexp.config import Config
from zeroexp.errors import ModelError, NonFiniteError, OptimizerError
from zeroexp.layout import Layout
from zeroexp.ledger import Ledger
from zeroexp.optim.face import Face
from zeroexp.optim.groups import group_numbers
from zeroexp.placement import STAGES
from zeroexp.precision import LossScale, Policy
from zeroexp.zero.access import Guards, ModuleHook
from zeroexp.zero.boundary import Agreement, agree, first_nonfinite
from zeroexp.zero.hooks import Hooks
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.owner import EngineOwner
from zeroexp.zero.reducer import Reducer
from zeroexp.zero.registry import forget, register
from zeroexp.zero.residency import Direction, Residency
from zeroexp.zero.segment import Surroundings
from zeroexp.zero.stepper import Stepper
from zeroexp.zero.unit import Life, UnitState

_LOG = logging.getLogger("zeroexp")


class Engine:
    """Shards ``module`` in place and trains it with the user's own ``optimizers``.

    Parameter names and objects stay; gradients live in the engine (``param.grad`` is ``None`` after
    a backward, see :meth:`full_grad`). Every rank must build the engine at the same point.
    ``config`` is a :class:`Config` or a partial mapping of it. ``divide_accumulation=False``: the
    caller divides the loss by the number of micro-batches itself. ``clip=None``: the caller clips
    by itself; by default :meth:`step` clips to ``trainer.gradient_clip_val``.

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
    ) -> None:
        if not isinstance(config, Config):
            config = Config.from_mapping(with_ranks(config or {}))
        self.config = config.resolved()
        self.module = module
        self.optimizers = _as_list(optimizers)
        self.device = torch.device(device) if device is not None else _device_of(module)
        self.ledger = Ledger()
        self.accumulate = config.trainer.accumulate_grad_batches
        """Micro-batches per step, for the plain loop; may be changed between steps."""
        self._divide_accumulation = divide_accumulation
        self._clip = config.trainer.gradient_clip_val if clip == "config" else clip
        self.policy = Policy.from_config(self.config)
        zero = self.config.zero
        shard_size = zero.shard_size if isinstance(zero.shard_size, int) else None
        if zero.shard_size == "node":
            shard_size = self.config.trainer.devices
        self.world = World.create(
            self.ledger, shard_size=shard_size, timeout=float(self.config.launch.timeout)
        )
        self.rank, self.world_size = self.world.rank, self.world.size
        # An engine that is dropped without close() must not leave its threads behind.
        weakref.finalize(self, self.world.close)
        placement = STAGES[zero.stage]
        self._around = Surroundings(
            self.world,
            self.ledger,
            placement,
            self.policy,
            BufferPool(self.device, self.ledger, "gradients"),
            self.device,
            zero.bucket,
        )
        each = zero.reduce == "each" or (zero.reduce == "auto" and placement.grads.sharded)
        self._reduce_each = each
        first_group, groups = group_numbers(module, self.optimizers)
        self.model = ShardedModel(module, groups, self._around, cut=zero.unit)
        root = next((u for u in self.model.units if u.name == ""), None)
        self._root = root
        reshard = zero.reshard_after_forward
        self.residency = Residency(
            self.model.units,
            prefetch=zero.prefetch if zero.overlap else 0,
            keeps=lambda unit: reshard == "false" or (reshard == "auto" and unit is root),
        )
        self._trainable_units = self._units_with_gradients()
        self.reducer = Reducer(self._trainable_units, overlap=zero.overlap)
        self.steppers: list[Stepper] = []
        for optimizer, first in zip(self.optimizers, first_group, strict=True):
            self.steppers.append(
                Stepper(self._bind(optimizer), self.model.trainable_segments, first, self._around)
            )
        self._take_over_optimizer_state()
        scale = self.config.precision.loss_scale
        self.scale = LossScale(
            scale, dynamic=scale.mode == "dynamic", active=scale.mode in ("dynamic", "static")
        )
        self._closed = False
        self._hooks = Hooks(self.residency, self.reducer, self._walk_begins, self._backward_begins)
        self._guards = Guards()
        self._attach()
        self._in_backward = False
        self._bare = False
        self._warned = False
        self._micro_steps = 0
        self._boundary = True
        self._unreduced = False
        self._loss_finite = True
        self._window_scale: float | None = None
        self._agreements: dict[int, Agreement] = {}
        self._factors: dict[int, float] = {}
        self._summed: set[int] = set()
        self.grad_norm: float | None = None
        """Global norm of the last gradients, unscaled, before clipping; ``None`` before the first
        boundary."""
        self.grad_norm_clipped: float | None = None
        """The same after clipping."""
        self.scheduler: Any = None
        """A learning-rate scheduler that :meth:`step` advances after each applied step, if set."""
        self.global_steps = 0
        """Boundaries passed, skipped ones included."""
        self.skipped_steps = 0
        """Boundaries at which no step was applied because a gradient was not finite."""

    # -- construction ------------------------------------------------------------------------------

    def _bind(self, optimizer: Optimizer) -> Face:
        this = weakref.proxy(self)
        return Face(
            optimizer,
            on_step=lambda: this.step(optimizer),
            on_zero_grad=lambda: this.zero_grad(optimizer),
        )

    def _take_over_optimizer_state(self) -> None:
        """State that the optimizers of rank 0 have already (loaded from a torch checkpoint, or of
        an earlier engine's) goes on; what is in other ranks' optimizers is not used."""
        for stepper in self.steppers:
            optimizer = stepper.optimizer
            given = self.world.control.exchange(
                torch.tensor([len(optimizer.state)]), "take-over of optimizer state"
            )
            if given[0].item():
                whole = type(optimizer).state_dict(optimizer) if self.rank == 0 else {}
                full.load_optimizer_state(self.model, stepper, whole)
            optimizer.state.clear()

    def _attach(self) -> None:
        root_module = self.module
        self._hooks.attach_root(root_module, self._root, self._forward_begins)
        owners = {id(u): EngineOwner(u, self.model, self.residency) for u in self.model.units}
        for unit in self.model.units:
            if unit.sharded and unit is not self._root:
                self._hooks.attach_unit(unit)
            for segment in unit.trainable_segments:
                for slot in range(len(segment.params)):
                    self._hooks.attach_parameter(unit, segment, slot)
        for param, (unit, _, _) in zip(
            self.model.params.values(),
            [self.model.place[id(p)] for p in self.model.params.values()],
            strict=True,
        ):
            register(param, owners[id(unit)])
        for module in root_module.modules():
            table = {
                name: owners[id(self.model.place[id(p)][0])]
                for name, p in dict.items(module._parameters)
                if p is not None
            }
            if table:
                self._guards.install(module, table)
        for unit in self.model.units:
            if unit.sharded:
                owner = owners[id(unit)]
                self._guards.keep(
                    unit.module.register_state_dict_pre_hook(ModuleHook(owner.open)),
                    unit.module._register_state_dict_hook(ModuleHook(owner.shut)),
                )

    def _units_with_gradients(self) -> list[UnitState]:
        """In the order in which a plain backward completes them."""
        return [u for u in reversed(self.model.units) if u.trainable_segments]

    def _forward_begins(self) -> None:
        """A pass starts: parameters that the user unfroze since the last one get gradients and
        optimizer state."""
        if torch._C._current_graph_task_id() == -1:
            self._end_failed_walk()
        fresh = self.model.thaw()
        if not fresh:
            return
        for segment in fresh:
            unit = self.model.place[id(segment.params[0])][0]
            for slot in range(len(segment.params)):
                self._hooks.attach_parameter(unit, segment, slot)
        for stepper in self.steppers:
            stepper.adopt(fresh)
        self._trainable_units = self._units_with_gradients()
        self.reducer.set_units(self._trainable_units)

    @property
    def layout(self) -> Layout:
        """Which bytes of which parameter lie where."""
        return self.model.layout

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
            if self._root is not None:
                self.residency.need(self._root)
            yield
            failed = False
        finally:
            self.residency.exit_scope(failed)

    # -- backward ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Factor on the loss of the next backward. It changes only while no gradients are held:
        those of another optimizer that waits for its step must be unscaled with the scale that
        produced them."""
        return self._window_scale if self._window_scale is not None else self.scale.value

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
                "detached, computed under "
                "torch.no_grad(), or is everything frozen?"
            )
        if loss.device.type == "cpu":
            self._loss_finite = self._loss_finite and math.isfinite(loss.item())
        with self.backward_scope(last=last):
            self.scaled(loss).backward(retain_graph=retain_graph, create_graph=create_graph)

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times :attr:`loss_scale`, for code that calls ``.backward()`` itself."""
        return loss * self.loss_scale if self.loss_scale != 1.0 else loss

    @contextmanager
    def backward_scope(self, *, last: bool | None = None) -> Iterator[None]:
        """Around one call of autograd; what it leaves behind is reduced when it ends."""
        self._begin_backward(last)
        if self.residency.gathers and torch.is_grad_enabled():
            self.residency.begin_pass(Direction.BACKWARD)
            if self._root is not None:
                self.residency.need(self._root)
        try:
            yield
        except BaseException:
            self._in_backward = False
            self.reducer.reducing = False
            self.residency.end_pass(failed=True)
            raise
        self._end_backward()

    def _begin_backward(self, last: bool | None) -> None:
        self._window_scale = self.loss_scale
        self._micro_steps += 1
        self._boundary = self._micro_steps >= self.accumulate if last is None else last
        parts = self.accumulate if self._divide_accumulation else 1
        self._in_backward = True
        self._reopen_gradients()
        reduce = self._reduce_each or self._boundary
        self.reducer.begin(
            reduce=reduce,
            divisor=float(parts * self.world_size),
            divide_on_arrival=self._reduce_each or self.accumulate == 1,
        )
        self._unreduced = not reduce

    @torch.no_grad()
    def _reopen_gradients(self) -> None:
        """More gradients will be added to those that were agreed upon: clipping decided so far is
        applied to them now, and of what replicas have summed one replica keeps the sum."""
        for stepper in self.steppers:
            factor = self._factors.pop(id(stepper), 1.0)
            if id(stepper) in self._summed and self.world.replicas.index:
                factor = 0.0
            if factor != 1.0:
                for segment in stepper.segments:
                    if segment.has_owned:
                        segment.owned.mul_(factor) if factor else segment.owned.zero_()
        self._agreements.clear()
        self._summed.clear()

    def _end_backward(self) -> None:
        self._in_backward = False
        if self.residency.direction is Direction.BACKWARD:
            self.residency.end_pass()
        self.reducer.end()

    def _walk_begins(self) -> None:
        """Autograd reached the model outside :meth:`backward_scope`: a bare ``loss.backward()``, or
        ``autograd.grad``, which leaves no gradients and is no micro-batch."""
        if not self._in_backward:
            Variable._execution_engine.queue_callback(self._end_walk)

    def _end_walk(self) -> None:
        if not self._in_backward and self.residency.direction is Direction.BACKWARD:
            self.residency.end_pass()

    def _backward_begins(self) -> None:
        """A gradient arrived: the walk is a backward."""
        if self._in_backward:
            return
        self._begin_backward(None)
        self._bare = True
        Variable._execution_engine.queue_callback(self._end_bare_backward)

    def _end_bare_backward(self) -> None:
        if self._in_backward:
            self._bare = False
            self._end_backward()

    def _end_failed_walk(self) -> None:
        """Autograd calls nobody when it raises: what a bare backward left open ends here."""
        if self._bare:
            self._bare = self._in_backward = False
            self.reducer.reducing = False
        if not self._in_backward and self.residency.direction is Direction.BACKWARD:
            self.residency.end_pass(failed=True)

    # -- boundary ----------------------------------------------------------------------------------

    def _stepper(self, optimizer: Optimizer | None) -> list[Stepper]:
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
        return all(self._finish(s).finite for s in self._stepper(optimizer))

    def _finish(self, stepper: Stepper) -> Agreement:
        key = id(stepper)
        if key in self._agreements:
            return self._agreements[key]
        if self._unreduced:
            self.reducer.flush([u for u in self._trainable_units if u.trains])
            self._unreduced = False
        agreement = self._agree(stepper)
        if agreement.late:  # gradients that arrived after their unit had been reduced, on some rank
            self.reducer.flush([self._trainable_units[i] for i in agreement.late])
            agreement = self._agree(stepper)
        if self.world.replicas.size > 1 and key not in self._summed:
            self._summed.add(key)
            for segment in stepper.segments:
                self.world.replicas.all_reduce(
                    segment.owned, tag=segment.tag, what="all-reduce over the replicas"
                ).wait()
            agreement = self._agree(stepper)
        self._agreements[key] = agreement
        norm = math.sqrt(agreement.sum_squares) / self.loss_scale if agreement.finite else math.nan
        self.grad_norm = self.grad_norm_clipped = norm
        return agreement

    def _agree(self, stepper: Stepper) -> Agreement:
        orders = [*self.residency.orders.values(), self.reducer.order]
        agreement = agree(
            self.world,
            self._trainable_units,
            stepper.segments,
            digest=sum(order.digest() for order in orders),
            loss_finite=self._loss_finite,
        )
        if agreement.same_order:
            for order in orders:
                order.adopt()
        return agreement

    def clip_norm(self, max_norm: float, optimizer: Optimizer | None = None) -> float:
        """Scale the gradients down to a global L2 norm of ``max_norm``; returns the norm before
        (torch's ``clip_grad_norm_``, with its 1e-6)."""
        for stepper in self._stepper(optimizer):
            self._finish(stepper)
        norm = self._norm_of(self._stepper(optimizer))
        self.grad_norm = self.grad_norm_clipped = norm
        if math.isfinite(norm):
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            self.grad_norm_clipped = norm * coefficient
            for stepper in self._stepper(optimizer):
                self._factors[id(stepper)] = self._factors.get(id(stepper), 1.0) * coefficient
        return norm

    def clip_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        """Clamp every element of the unscaled gradients to ``[-limit, limit]``."""
        for stepper in self._stepper(optimizer):
            if not self._finish(stepper).finite:
                continue
            for segment in stepper.segments:
                if segment.has_owned:
                    bound = limit * self.loss_scale
                    segment.owned.clamp_(-bound, bound)
            del self._agreements[id(stepper)]
            before = self.grad_norm
            self._finish(stepper)
            self.grad_norm = before

    def _norm_of(self, steppers: Sequence[Stepper]) -> float:
        total = sum(self._agreements[id(s)].sum_squares for s in steppers)
        return math.sqrt(total) / self.loss_scale if math.isfinite(total) else math.nan

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """Apply the accumulated gradients. True if they were applied.

        In the plain loop this does nothing until ``accumulate`` backwards have been made. A step
        with a non-finite gradient is skipped, applied or an error, as ``precision.nonfinite`` says;
        all ranks do the same. Raises :class:`NonFiniteError`.
        """
        if not self._boundary:
            return False
        steppers = self._stepper(optimizer)
        agreements = [self._finish(s) for s in steppers]
        finite = all(a.finite for a in agreements)
        self.global_steps += 1
        self._micro_steps = 0
        if not finite and self.policy.nonfinite != "apply":
            self._refuse(steppers, agreements)
            return False
        if finite:
            norm = self._norm_of(steppers)
            self.grad_norm = self.grad_norm_clipped = norm
            if self._clip:
                assert not isinstance(self._clip, str)
                for one in steppers:
                    if id(one) not in self._factors:
                        self._factors[id(one)] = min(1.0, float(self._clip) / (norm + 1e-6))
            factor = self._factors.get(id(steppers[0]), 1.0) if steppers else 1.0
            self.grad_norm_clipped = norm * factor
        for stepper, agreement in zip(steppers, agreements, strict=True):
            touched = dict(zip((s.tag for s in stepper.segments), agreement.touched, strict=True))
            stepper.step(touched, self._factors.get(id(stepper), 1.0) / self.loss_scale)
        self.residency.release_all()
        self._forget(steppers)
        self.scale.update(overflow=False)
        if self.scheduler is not None:
            self.scheduler.step()
        self.ledger.mark_step()
        return True

    def _refuse(self, steppers: Sequence[Stepper], agreements: Sequence[Agreement]) -> None:
        """A gradient is not finite: skip or stop, on every rank alike."""
        scale = self.loss_scale
        segments = [s for stepper in steppers for s in stepper.segments]
        stop = self.policy.nonfinite == "stop"
        name, owner = "", -1
        if stop or (self.scale.dynamic and scale <= self.config.precision.loss_scale.floor):
            name, owner = first_nonfinite(self.world, segments)
        bad = sorted({r for a in agreements for r in a.bad_loss_ranks})
        self.residency.release_all()
        self._forget(steppers)
        if stop:
            origin = f"; the loss was not finite on rank {', '.join(map(str, bad))}" if bad else ""
            raise NonFiniteError(
                f"step {self.global_steps}: the gradient of {name} is not finite (found by rank "
                f"{owner}, which owns that "
                f"part){origin}. Set precision.nonfinite=skip to skip such steps; look for a "
                "division by zero, a log of "
                "zero, or a learning rate that is too high."
            )
        before = self.scale.value
        self.scale.update(overflow=True, culprit=name)
        self.skipped_steps += 1
        if self.rank == 0:
            change = (
                f"loss scale {before:g} -> {self.scale.value:g}"
                if self.scale.dynamic
                else "not finite"
            )
            _LOG.warning("step %d skipped: gradients overflow, %s", self.global_steps, change)
        self.ledger.mark_step()

    def zero_grad(self, optimizer: Optimizer | None = None) -> None:
        """Forget accumulated gradients (of one optimizer, or all)."""
        self._end_failed_walk()
        if 0 < self._micro_steps < self.accumulate and not self._warned and self.rank == 0:
            self._warned = True
            _LOG.warning(
                "zero_grad() dropped %d of %d micro-batches of a step: with "
                "trainer.accumulate_grad_batches, call it after step() returned True, or never",
                self._micro_steps,
                self.accumulate,
            )
        if self.reducer.interrupted:
            self.reducer.abandon()
        self._forget(self._stepper(optimizer))
        self._micro_steps = 0

    def _forget(self, steppers: Sequence[Stepper]) -> None:
        mine = {s.tag for stepper in steppers for s in stepper.segments}
        for unit in self._trainable_units:
            unit.clear_gradients(mine)
        for stepper in steppers:
            self._agreements.pop(id(stepper), None)
            self._factors.pop(id(stepper), None)
            self._summed.discard(id(stepper))
        self._loss_finite = True
        if not any(any(s.touched) for s in self.model.trainable_segments):
            self._window_scale = None

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
        agreement = self._finish(stepper)
        if not agreement.touched[stepper.segments.index(segment)][slot]:
            return None
        out = torch.empty(segment.spec.size, dtype=segment.grad_dtype, device=self.device)
        self.world.gather.all_gather(
            out, segment.owned.clone(), tag=segment.tag, what="all-gather of a gradient"
        ).wait()
        at = segment.spec.slots[slot]
        grad = out[at.offset : at.stop].view(at.spec.shape).float()
        return grad * (self._factors.get(id(stepper), 1.0) / self.loss_scale)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters (floats in fp32) and buffers by name, on the CPU of rank 0; empty
        elsewhere (collective)."""
        self.world.open()
        return full.model_state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Set parameters and buffers from rank 0's ``state`` (collective). Raises
        :class:`CheckpointError`."""
        self.world.open()
        full.load_model_state(self.model, state, strict=strict)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state in torch's own format with whole tensors, on rank 0; empty
        elsewhere (collective)."""
        self.world.open()
        return full.optimizer_state(self.model, self._stepper(optimizer)[0])

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Set the optimizer's state from rank 0's ``state`` (collective). Raises
        :class:`CheckpointError`."""
        self.world.open()
        full.load_optimizer_state(self.model, self._stepper(optimizer)[0], state)

    def scalar_state(self) -> dict[str, Any]:
        """Counters and loss scale: what resume needs beside model and optimizers."""
        return {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scale.state_dict(),
        }

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`scalar_state`."""
        self.global_steps = int(state["global_steps"])
        self.skipped_steps = int(state["skipped_steps"])
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

    def close(self, collective: bool = True) -> None:
        """End the engine's work on the module: parameters become whole and ordinary again.

        ``collective=False`` gathers nothing, for a rank that failed and must not wait for the
        others: sharded parameters then stay placeholders. State can still be saved afterwards.
        """
        if self._closed:
            return
        self._closed = True
        self._hooks.detach()
        self._guards.remove()
        for param in self.model.params.values():
            forget(param)
        for stepper in self.steppers:
            stepper.face.unbind()
        if collective:
            self.residency.release_all()
            for unit in self.model.units:
                if unit.sharded and unit.life is Life.SHARDED:
                    unit.gather()
                unit.wait()
                unit.pins += 1
            self.world.close()


def _as_list(optimizers: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
