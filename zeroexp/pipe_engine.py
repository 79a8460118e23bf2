"""An engine whose module is spread over the stages of a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.comm.notes import exchange_notes
from zeroexp.comm.ranks import with_ranks
from zeroexp.config import Config
from zeroexp.engine import Engine, device_of
from zeroexp.errors import ModelError, RankMismatch
from zeroexp.pipeline.residency import with_residency
from zeroexp.pipeline.runtime import (
    Channel,
    Executor,
    Mapped,
    Parts,
    Result,
    layers_of,
    split,
)
from zeroexp.pipeline.runtime.arrangement import Sampling, arrange
from zeroexp.pipeline.runtime.carried import carry_losses
from zeroexp.pipeline.runtime.part import layered_in, part_of
from zeroexp.pipeline.runtime.stage_owner import StageOwner
from zeroexp.pipeline.runtime.tree import tensors_of
from zeroexp.precision import Policy
from zeroexp.zero.companion import sections
from zeroexp.zero.marked import MarkedResidency

_LOG = logging.getLogger("zeroexp")

Loss = Callable[[Any, Any], Tensor]
"""A micro-batch's mean loss from the model's output and its target."""


class PipeEngine(Engine):
    """Trains ``module`` as a pipeline of ``config.pipeline.stages`` ranks, with any ZeRO stage,
    offload and precision in each stage's data-parallel group.

    ``module`` (or one child of it that holds all parameters) is an ``nn.Sequential`` or offers
    ``pipeline_layers()``; every rank builds all of it and keeps its own stages. Rank r of N holds
    place ``r // (N / stages)`` of the pipe. ``loss(output, target)`` gives a micro-batch's mean
    loss. ``recompute``: a stage keeps its input alone for backward and runs again there.
    ``context()`` is entered around every forward of a stage, the loss included. ``sample``: the
    input of one micro-batch, with which rank 0 measures the layers where ``pipeline.schedule`` is
    ``auto`` or ``pipeline.cut`` is ``time``. Everything else is :class:`Engine`'s; in the place of
    forward and backward there is :meth:`train_batch`.

    Raises what :class:`Engine` raises, and :class:`ConfigError` where stages, schedule,
    micro-batches and layers do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] | None,
        config: Config | Mapping[str, Any] | None = None,
        *,
        loss: Loss | None = None,
        recompute: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sample: Any = None,
        device: torch.device | str | None = None,
        clip: float | str | None = "config",
    ) -> None:
        if not isinstance(config, Config):
            config = Config.from_mapping(with_ranks(config or {}))
        config = config.resolved()
        asked = config.pipeline
        self.micro_batches = asked.num_micro_batches(config.micro_batch_size)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if size % asked.size:
            raise RankMismatch(
                f"pipeline.stages={asked.size} does not divide the {size} ranks that run"
            )
        model = layered_in(module)
        layers = layers_of(model)
        where = torch.device(device) if device is not None else device_of(module)
        sampling = Sampling(sample, context, where, _narrowing(config, module))
        found = arrange(asked, self.micro_batches, layers, sampling)
        schedule = found.schedule
        self._found = found
        if rank == 0 and found.reason:
            _LOG.info("pipeline.schedule=auto: %s", found.reason)
        place = rank // (size // asked.size)
        held = schedule.stages_of(place)
        stages = split(model, found.where, held, recompute=recompute, context=context).stages
        super().__init__(
            module,
            optimizers,
            config,
            device=device,
            divide_accumulation=False,
            clip=clip,
            steps_at_once="the stages of a pipeline are stepped together",
            part=part_of(module, layers, found.where, schedule.rank_of, place),
        )
        numbers = map(found.where.stage, range(found.where.num_stages))
        parts = [[layers[number][1] for number in stage] for stage in numbers]
        carry_losses(stages, parts, self.companions)
        self._sections = sections(self.companions, [module])
        self._meets_others = any(section.meets_others for section in self._sections)
        residency = cast(MarkedResidency, self.residency)
        if residency.gathers:
            schedule = with_residency(schedule, asked.whole_stages)
        channel = Channel(
            self.world.pipe.ranks, self.rank, self.world.channel, self.ledger, self.world.timeout
        )

        @contextmanager
        def forward_scope() -> Iterator[None]:
            with self.scope(), context():
                yield

        self.owner = StageOwner(self.model, residency, stages, forward_scope, self.backward_scope)
        self.executor = Executor(
            schedule, stages, channel, loss=loss or _own_loss, owner=self.owner
        )
        self.runs_per_step = config.trainer.accumulate_grad_batches
        """Batches whose gradients make a step; the loss of each is divided by them."""
        self._runs = 0
        self._torn = False
        """Whether the last batch failed, so that gradients are incomplete."""
        self.zero_grad_comes_late = False
        """For a loop that calls ``zero_grad`` between forward and backward: it does nothing."""
        self.accumulate = self.runs_per_step * self.micro_batches

    @property
    def arrangement(self) -> dict[str, Any]:
        """Schedule, ranks, stages, micro-batches, the number of layers of each stage, and what
        ``pipeline.schedule=auto`` says of its choice."""
        schedule, where = self._found.schedule, self._found.where
        return {
            "schedule": schedule.name,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "micro_batches": schedule.micro_batches,
            "layers": list(where.sizes),
            "reason": self._found.reason,
        }

    # -- training ----------------------------------------------------------------------------------

    def train_batch(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        weights: Sequence[float] | None = None,
        last: bool | None = None,
    ) -> float:
        """Forward and backward of one batch ``inputs`` (this data rank's, any nested value whose
        tensors have samples first), in ``micro_batches`` equal parts; the mean loss in this pipe,
        on each of its ranks.

        ``targets`` are cut alike. The first stage needs the inputs, the last one the targets; the
        others' are not looked at. ``weights``: of each micro-batch's loss in the mean, its number
        of tokens, say. ``last``: whether a step follows (by default after every
        ``trainer.accumulate_grad_batches``-th). Raises :class:`StageError` on every rank of the
        pipe when a stage fails on any, :class:`ConfigError` for a batch that does not divide.
        """
        parts = [
            None if value is None else Parts(value, self.micro_batches)
            for value in (inputs if self.is_first else None, targets if self.is_last else None)
        ]
        return self.train_micro_batches(*parts, weights=weights, last=last)

    def train_micro_batches(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        weights: Sequence[float] | None = None,
        last: bool | None = None,
    ) -> float:
        """The same of micro-batches that the caller has cut."""
        self._recover()
        self._forward_begins()  # what was unfrozen moves, which it cannot while it is in use
        self._runs += 1
        self.owner.ends_window = self._runs >= self.runs_per_step if last is None else last
        if self.owner.ends_window:
            self._runs = 0
        self._torn = True
        with self._together():
            result = self.executor.run(
                None if inputs is None else Mapped(inputs, self.cast),
                targets,
                weights=weights,
                scale=self.loss_scale / self.runs_per_step,
            )
        self._torn = False
        assert result.loss is not None  # for the type checker: a training run has one
        if self.is_last:
            self._window.saw_loss(torch.tensor(result.loss))
        return result.loss

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around a run. Where its forwards need other data-parallel ranks, these wait for one that
        has failed, and do not know why: it must not start another run in the meantime."""
        try:
            yield
        except BaseException:
            if self._meets_others:
                self.executor.interrupt()
            raise

    def _recover(self) -> None:
        """After a run that failed: no stage is in use, gradients of a part of a batch are no
        gradients, and losses that modules made in it are nobody's."""
        self.owner.tidy()
        if self._torn:
            self._torn = False
            self._runs = 0
            super().zero_grad()
            for section in self._sections:
                section.forget()

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Result:
        """Forward of one batch of any size without gradients: with ``targets`` the mean loss on
        every rank of the pipe, without them the outputs by micro-batch on the last stage's. The
        first stage needs the inputs, the last one the targets."""
        self.executor.refuse_if_interrupted()
        sizes = {t.shape[0] for t in tensors_of(inputs) if t.dim()} if self.is_first else {0}
        what = "size of a batch"
        notes = self.executor.channel.exchange_notes(max(sizes, default=0), what)
        samples = [notes[self.first_place]]
        if self._meets_others:  # as many forwards on each of them
            samples = exchange_notes(self.world.control, samples[0], what)
        count = next(
            m for m in range(self.micro_batches, 0, -1) if all(n % m == 0 for n in samples)
        )
        parts = [
            None if value is None else Parts(value, count)
            for value in (inputs if self.is_first else None, targets if self.is_last else None)
        ]
        return self.evaluate_micro_batches(*parts, count=count)

    def evaluate_micro_batches(
        self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, *, count: int
    ) -> Result:
        """The same of ``count`` micro-batches that the caller has cut."""
        self._recover()
        self._forward_begins()
        with self._together(), self.owner.all_whole():
            return self.executor.evaluate(
                None if inputs is None else Mapped(inputs, self.cast),
                targets,
                micro_batches=count,
            )

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """See :meth:`Engine.step`. After a batch that failed there is nothing to step with: the
        gradients of its window are dropped by the next one."""
        return False if self._torn else super().step(optimizer)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, which needs the inputs."""
        return 0 in self.executor.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which needs the targets."""
        return self.last_place == self.executor.rank

    @property
    def first_place(self) -> int:
        """The place in the pipe that holds the first stage."""
        return self.executor.schedule.rank_of[0]

    @property
    def last_place(self) -> int:
        """The place in the pipe that holds the last stage."""
        return self.executor.schedule.rank_of[-1]

    def zero_grad(self, optimizer: Optimizer | None = None) -> None:
        if not self.zero_grad_comes_late:
            self._runs = 0
            super().zero_grad(optimizer)

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """See :meth:`Engine.full_grad`; on every rank of the pipe, whichever holds ``param``."""
        pipe, what = self.world.pipe, "whole gradient of a parameter"
        name = self.model.name_of(param)
        held = self.model.place.get(id(param))
        steps = [
            s for s, stepper in enumerate(self.steppers) if held and held[1] in stepper.segments
        ]
        source = self.model.holders(name)[0]
        number = exchange_notes(pipe, steps, what)[source]
        if not number:
            return None
        if held:
            grad = super().full_grad(param)
        else:
            self._boundary.finish(self.steppers[number[0]])
            grad = None
        found = exchange_notes(pipe, grad is not None, what)[source]
        if not found:
            return None
        if grad is None:
            grad = torch.empty(param.shape, dtype=torch.float32, device=self.device)
        grad = grad.contiguous()
        pipe.broadcast(grad.view(-1), source=source, tag=0, what=what).wait()
        return grad

    def close(self, collective: bool = True, *, keep_sharded: bool = False) -> None:
        if keep_sharded:
            raise ModelError(
                "close(keep_sharded=True) leaves a module that goes on working, and a stage of a "
                "pipeline cannot do so alone: call close(), which makes the module whole on every "
                "rank, or save a checkpoint and call close(collective=False)"
            )
        if collective and not self._closed:
            self._recover()
        super().close(collective)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "the stages of a pipeline run together: call engine.train_batch(inputs, targets), or "
            "engine.evaluate(inputs, targets), on every rank"
        )

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self()


def _own_loss(output: Any, target: Any) -> Tensor:
    raise ModelError("a pipeline needs its loss: PipeEngine(..., loss=lambda output, target: ...)")


def _narrowing(config: Config, module: nn.Module) -> float:
    """Bytes of an element of ``module`` in training over those that it has now."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    return Policy.from_config(config).storage_dtype(dtype).itemsize / dtype.itemsize
