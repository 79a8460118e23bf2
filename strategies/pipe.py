"""Steps of a LightningModule whose model is spread over a pipeline.

The user's step is called as it is, once per micro-batch; in it the call of the model is where the
pipe is. On the first stage that call ends the step, and its argument goes into the pipe; on the
last stage it returns what comes out of the pipe, and the step goes on to the loss. What the step
logs there is logged on every rank of the pipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import ModelError
from zeroexp.pipeline.runtime import Mapped, split_batch
from zeroexp.pipeline.runtime.part import layered_in

if TYPE_CHECKING:
    from zeroexp.pipe_engine import PipeEngine

Step = Callable[..., Any]

WEIGHT = "pipeline_weight"
"""A method of the LightningModule: the weight of a micro-batch's loss in the mean of the batch."""

_LOGGED = {
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "sync_dist", "batch_size"),
    *("add_dataloader_idx", "rank_zero_only"),
}
"""What of the arguments of ``self.log`` the other ranks are told."""


class _Reached(BaseException):
    """The step has come to the call of the model. No Exception: the user's ``except`` blocks are
    not for it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PipedSteps:
    """``module``'s steps, inside ``context()``; ``engine`` is set once it is built with
    :meth:`loss`."""

    engine: PipeEngine

    def __init__(self, module: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._context = context
        self._model: nn.Module = layered_in(module)
        self._outputs: dict[int, Any] = {}
        self._log: list[tuple[str, float, dict[str, Any]]] = []

    # ------------------------------------------------------------------ what Lightning calls
    def training(self, batch: Any, rest: Sequence[Any], *, last: bool) -> dict[str, Tensor]:
        """Forward and backward of ``batch``; the loss and the other numbers that ``training_step``
        returns, as means over the micro-batches, on every rank."""
        count = self.engine.micro_batches
        parts = split_batch(batch, count)
        weigh = getattr(self._module, WEIGHT, None)
        weights = None if weigh is None else [float(weigh(part)) for part in parts]
        calls = self._calls(self._module.training_step, parts, rest)
        with self._recording():
            loss = self.engine.train_micro_batches(calls[0], calls[1], weights=weights, last=last)
        numbers = self._share(_numbers(self._outputs), weights or [1.0] * count)
        device = self.engine.device
        return {name: torch.tensor(value, device=device) for name, value in numbers.items()} | {
            "loss": torch.tensor(loss, device=device)
        }

    def evaluation(self, step: Step, batch: Any, rest: Sequence[Any]) -> Any:
        """One batch as one micro-batch; what ``step`` returns, on the last stage's ranks."""
        inputs, calls = self._calls(step, [batch], rest)
        with self._recording():
            self.engine.evaluate_micro_batches(inputs, calls, count=1)
        self._share({}, [1.0])
        return self._outputs.get(0)

    # ------------------------------------------------------------------ at the ends of the pipe
    def _calls(
        self, step: Step, parts: Sequence[Any], rest: Sequence[Any]
    ) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
        """The inputs of the first stage, found when they are asked for, and the calls that the last
        stage completes."""
        self._outputs = {}
        calls = [_Call(number, step, (part, *rest)) for number, part in enumerate(parts)]
        first, last = self.engine.is_first, self.engine.is_last
        return Mapped(calls, self._input_of) if first else None, calls if last else None

    def _input_of(self, call: _Call) -> Any:
        self._log, kept = [], self._log
        try:
            with self._context(), self._calling(_reach):
                call()
        except _Reached as reached:
            return reached.value
        finally:
            self._log = kept  # what comes before the model's call is logged on the last stage
        raise ModelError(
            f"{call.name} did not call {type(self._model).__name__}: the pipeline is where it does"
        )

    def loss(self, output: Any, call: _Call) -> Tensor:
        """The loss that the rest of a step makes of the model's ``output``."""
        used: list[bool] = []

        def answer(*args: Any, **kwargs: Any) -> Any:
            if used:
                raise ModelError(
                    f"{call.name} calls {type(self._model).__name__} twice: in a pipeline it runs "
                    "once per micro-batch"
                )
            used.append(True)
            return output

        with self._calling(answer):
            result = self._outputs[call.number] = call()
        if not torch.is_grad_enabled():
            return torch.zeros(())
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"{call.name} returned {type(result).__name__}: return the loss, a tensor of one "
                "number, or a dict that has it under 'loss'"
            )
        return loss

    @contextmanager
    def _calling(self, instead: Step) -> Iterator[None]:
        """A call of the model is a call of ``instead``."""
        self._model.__dict__["forward"] = instead
        try:
            yield
        finally:
            del self._model.__dict__["forward"]

    # ------------------------------------------------------------------ what is logged
    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._log = []
        self._module.__dict__["log"] = self._record
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def _record(self, name: str, value: Any, **kwargs: Any) -> None:
        if not isinstance(value, (int, float, Tensor)) or (
            isinstance(value, Tensor) and value.numel() != 1
        ):
            raise ModelError(
                f"self.log({name!r}, ...) of a {type(value).__name__}: in a pipeline only the last "
                "stage has it, and only numbers can be brought to the other ranks. Log its value"
            )
        odd = [key for key, what in kwargs.items() if key not in _LOGGED or callable(what)]
        if odd:
            raise ModelError(f"self.log({name!r}, {odd[0]}=...) does not work in a pipeline")
        self._log.append((name, float(value), kwargs))

    def _share(
        self, numbers: Mapping[str, list[float]], weights: Sequence[float]
    ) -> dict[str, float]:
        """Log on every rank of the pipe what was logged on the last stage, as means over the
        micro-batches; the same of ``numbers``."""
        logged: dict[str, tuple[list[float], dict[str, Any]]] = {}
        for name, value, kwargs in self._log:
            values, _ = logged.get(name, ([], {}))
            logged[name] = ([*values, value], kwargs)
        world = self.engine.world
        note = [
            {name: [_mean(values, weights), kwargs] for name, (values, kwargs) in logged.items()},
            {name: _mean(values, weights) for name, values in numbers.items()},
        ]
        notes = exchange_notes(world.pipe, note, "what the last stage logs")
        found, means = notes[self.engine.last_place]
        for name, (value, kwargs) in found.items():
            self._module.log(name, value, **kwargs)
        return {name: float(value) for name, value in means.items()}


class _Call:
    """A step of the module on one micro-batch."""

    def __init__(self, number: int, step: Step, args: tuple[Any, ...]) -> None:
        self.number = number
        self.name = step.__name__
        self._step, self._args = step, args

    def __call__(self) -> Any:
        return self._step(*self._args)


def _reach(*args: Any, **kwargs: Any) -> NoReturn:
    if len(args) != 1 or kwargs:
        raise ModelError(
            f"the model of a pipeline is called with {len(args)} arguments and "
            f"{sorted(kwargs)}: its first layer takes one (a tensor, or a tuple, list or dict)"
        )
    raise _Reached(args[0])


def _numbers(outputs: Mapping[int, Any]) -> dict[str, list[float]]:
    """The single numbers in what the steps returned, by key."""
    found: dict[str, list[float]] = {}
    for number in sorted(outputs):
        result = outputs[number]
        for key, value in result.items() if isinstance(result, Mapping) else ():
            if isinstance(value, Tensor) and value.numel() == 1 and key != "loss":
                found.setdefault(str(key), []).append(float(value))
    return found


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) != len(weights):  # not once per micro-batch
        weights = [1.0] * len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)
