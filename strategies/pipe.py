"""Steps of a LightningModule whose model is spread over a pipeline.

The user's step is called as it is, once per micro-batch; in it the call of the model is where the
pipe is. On the first stage that call ends the step, and its argument goes into the pipe; on the
last stage it returns what comes out of the pipe, and the step goes on to the loss. What the step
logs there is logged on every rank of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import ConfigError, ModelError
from zeroexp.pipeline.runtime import Mapped, split_batch
from zeroexp.pipeline.runtime.part import layered_in
from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.micro_log import MicroLog, mean
from zeroexp.strategies.same_batch import check_same_batch

if TYPE_CHECKING:
    from zeroexp.pipe_engine import PipeEngine

Step = Callable[..., Any]

WEIGHT = "pipeline_weight"
"""A method of the LightningModule: the weight of a micro-batch's loss in the mean of the batch."""


def refuse_unpipeable(module: Any, ns: Namespace) -> None:
    """Raise :class:`ModelError` for what a LightningModule does itself and a pipeline cannot."""
    if not module.automatic_optimization:
        raise ModelError(
            "automatic_optimization=False does not work with a pipeline: forward and backward "
            "of its micro-batches run together, before training_step returns"
        )
    name = type(module).__name__
    if ns.is_overridden("backward", module):
        raise ModelError(
            f"{name}.backward would not be called in a pipeline: forward and backward of its "
            "micro-batches run together. Remove it, or train without a pipeline"
        )
    if type(module).state_dict is not nn.Module.state_dict:
        raise ModelError(
            f"{name}.state_dict does not work in a pipeline: no rank has all parameters. Change "
            "checkpoint['state_dict'] in on_save_checkpoint instead"
        )


class _Reached(BaseException):
    """The step has come to the call of the model. No Exception: the user's ``except`` blocks are
    not for it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PipedSteps:
    """``module``'s steps, inside ``context()``; ``engine`` is set once it is built with
    :meth:`loss`. Until :meth:`end`, the model cannot be called outside of steps: no rank has all of
    it."""

    engine: PipeEngine

    def __init__(self, module: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._context = context
        self._model: nn.Module = layered_in(module)
        self._outputs: dict[int, Any] = {}
        self._log = MicroLog(module)
        self._compared: set[str] = set()
        """Steps whose first batch was the same on all ranks of the pipe."""
        self._model.__dict__["forward"] = self._outside

    def end(self) -> None:
        """The model is the user's again."""
        self._model.__dict__.pop("forward", None)

    # ------------------------------------------------------------------ what Lightning calls
    def training(self, batch: Any, rest: Sequence[Any], *, last: bool) -> dict[str, Tensor]:
        """Forward and backward of ``batch``; the loss and the other numbers that ``training_step``
        returns, as means over the micro-batches, on every rank."""
        step = self._module.training_step
        self._compare(step, batch)
        parts = self._split(batch)
        weigh = getattr(self._module, WEIGHT, None)
        weights = None if weigh is None else [float(weigh(part)) for part in parts]
        calls = self._calls(step, parts, rest)
        # Lightning divides the loss that it is given by these, after the backward.
        self.engine.runs_per_step = self._module.trainer.accumulate_grad_batches
        with self._log.recording():
            loss = self.engine.train_micro_batches(calls[0], calls[1], weights=weights, last=last)
        numbers = self._share(_numbers(self._outputs), weights or [1.0] * len(parts))
        device = self.engine.device
        return {name: torch.tensor(value, device=device) for name, value in numbers.items()} | {
            "loss": torch.tensor(loss, device=device)
        }

    def evaluation(self, step: Step, batch: Any, rest: Sequence[Any]) -> Any:
        """One batch as one micro-batch; what ``step`` returns, on the last stage's ranks."""
        self._compare(step, batch)
        inputs, calls = self._calls(step, [batch], rest)
        with self._log.recording():
            self.engine.evaluate_micro_batches(inputs, calls, count=1)
        self._share({}, [1.0])
        return self._outputs.get(0)

    def _compare(self, step: Step, batch: Any) -> None:
        if step.__name__ not in self._compared:
            check_same_batch(batch, step.__name__, self.engine.world.pipe)
            self._compared.add(step.__name__)

    def _split(self, batch: Any) -> list[Any]:
        try:
            return split_batch(batch, self.engine.micro_batches)
        except ConfigError as error:
            hint = ". DataLoader(drop_last=True) leaves a shorter last batch out"
            raise ConfigError([replace(p, fix=p.fix + hint) for p in error.problems]) from error

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
        # What comes before the model's call is logged on the last stage.
        with self._log.unheard(), self._context(), self._calling(_reach):
            try:
                call()
            except _Reached as reached:
                return reached.value
        raise self._not_called(call)

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
        if not used:
            raise self._not_called(call)
        if not torch.is_grad_enabled():
            return torch.zeros(())
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"{call.name} returned a loss of {found}: return a tensor of one number, or a "
                "dict that has it under 'loss'; to leave a batch out, a loss times 0"
            )
        return loss

    @contextmanager
    def _calling(self, instead: Step) -> Iterator[None]:
        """A call of the model is a call of ``instead``."""
        before = self._model.__dict__["forward"]
        self._model.__dict__["forward"] = instead
        try:
            yield
        finally:
            self._model.__dict__["forward"] = before

    def _outside(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            f"{type(self._model).__name__} is spread over the ranks of a pipeline: it is called in "
            "training_step, validation_step, test_step and predict_step, nowhere else"
        )

    def _not_called(self, call: _Call) -> ModelError:
        return ModelError(
            f"{call.name} did not call {type(self._model).__name__}: the pipeline is where it does"
        )

    # ------------------------------------------------------------------ on every rank
    def _share(
        self, numbers: Mapping[str, list[float]], weights: Sequence[float]
    ) -> dict[str, float]:
        """Log on every rank of the pipe what was logged on the last stage; the means of its
        ``numbers``."""
        note = [
            self._log.of_batch(weights),
            {name: mean(values, weights) for name, values in numbers.items()},
        ]
        notes = exchange_notes(self.engine.world.pipe, note, "what the last stage logs")
        logged, means = notes[self.engine.last_place]
        self._log.tell(logged, len(notes))
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
