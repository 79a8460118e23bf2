"""The steps of a run: user code in the engine's scope, and what ranks agree on between batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from zeroexp.config import Config
from zeroexp.errors import ModelError
from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.faults import Sigterm
from zeroexp.strategies.optimization import Optimization
from zeroexp.strategies.pipe import PipedSteps


def check_output(output: Any) -> None:
    """Raises :class:`ModelError` unless ``output`` of training_step is a tensor, or a mapping with
    one under ``loss``.

    Lightning skips a batch for which training_step returns None. Here the backward pass of a batch
    needs every rank, and None on one of them would leave the others waiting.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return
    if isinstance(output, Mapping) and "loss" not in output:
        found = f"a dict without 'loss' (it has {', '.join(map(repr, output)) or 'nothing'})"
    elif isinstance(output, Mapping):
        found = f"a dict whose 'loss' is {_described(loss)}"
    else:
        found = _described(output)
    raise ModelError(
        f"training_step returned {found}. Return the loss, a tensor of one number, or a dict that "
        "has it under 'loss'; to leave a batch out, return a loss times 0."
    )


def _described(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}: {value!r:.60}"


class Steps:
    """Mixed into a Lightning strategy class, whose attributes the annotations name."""

    ns: Namespace
    optimization: Optimization
    lightning_module: Any
    precision_plugin: Any
    side: Any
    config: Config
    follow_optimizers: Any
    _sigterm: Sigterm
    _piped: PipedSteps | None

    @contextmanager
    def _around(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        # The module is not called here (there is no wrapper), so the root unit's hooks do not see
        # a pass begin.
        with context, self.optimization.engine.scope():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._piped is not None:
            batch, *rest = *args, *kwargs.values()
            self.optimization.pipe_begins(self._piped.engine)
            return self._piped.training(batch, rest, last=self.optimization.step_follows)
        with self._around(self.precision_plugin.train_step_context()):
            output = self.lightning_module.training_step(*args, **kwargs)
        if self.lightning_module.automatic_optimization:
            check_output(output)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._stop_evaluation()
        step = getattr(self.lightning_module, name)
        if self._piped is not None:
            batch, *rest = *args, *kwargs.values()
            return self._piped.evaluation(step, batch, rest)
        with self._around(context()):
            return step(*args, **kwargs)

    def evaluate_under_no_grad(self, trainer: Any) -> None:
        """Never ``torch.inference_mode``: what is gathered in it could not be used in training."""
        inside_fit = trainer.fit_loop.epoch_loop.val_loop
        for loop in (inside_fit, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are accumulating micro-batches."""
        return self.optimization.blocked()

    # ------------------------------------------------------------------ begin of a stage
    def on_train_start(self) -> None:
        self._sigterm.install()
        self._same_number_of_batches()

    def on_validation_start(self) -> None:
        self._evaluation_starts("num_val_batches")

    def on_test_start(self) -> None:
        self._evaluation_starts("num_test_batches")

    def on_predict_start(self) -> None:
        self._evaluation_starts("num_predict_batches")

    def _same_number_of_batches(self) -> None:
        """Train as many batches as the rank with the fewest has: a batch needs every rank."""
        loop = self.lightning_module.trainer.fit_loop
        fewest = self.side.extremes([loop.max_batches])[0][0]
        if loop.max_batches > fewest:
            warnings.warn(
                f"this rank has {loop.max_batches} training batches in an epoch and another one"
                f" {fewest:g}: every rank stops after {fewest:g}",
                stacklevel=2,
            )
            loop.max_batches = int(fewest)

    def _evaluation_starts(self, batches: str) -> None:
        self._sigterm.install()
        trainer = self.lightning_module.trainer
        mine = list(getattr(trainer, batches))
        if trainer.sanity_checking:
            mine = list(trainer.num_sanity_val_batches)
        fewest, most = self.side.extremes(mine)
        if self.config.zero.stage == 3 and fewest != most:
            raise ModelError(
                f"the ranks have different numbers of batches to evaluate: {fewest} at least,"
                f" {most} at most (by dataloader). At stage 3 every batch needs every rank: give"
                " each rank as many, as Lightning's distributed sampler does."
            )

    # ------------------------------------------------------------------ between batches
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sigterm.stop_if_agreed(self.side)
        self.follow_optimizers()

    def on_train_end(self) -> None:
        self._sigterm.forget()

    def _stop_evaluation(self) -> None:
        # Inside fit the ranks agree before the next training batch.
        if self.lightning_module.trainer.state.fn != self.ns.TrainerFn.FITTING:
            self._sigterm.stop_if_received()
