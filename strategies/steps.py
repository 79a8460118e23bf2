"""The steps of a run: user code in the engine's scope, and a look at SIGTERM between batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.faults import Sigterm
from zeroexp.strategies.optimization import Optimization


class Steps:
    """Mixed into a Lightning strategy class, whose attributes the annotations name."""

    ns: Namespace
    optimization: Optimization
    lightning_module: Any
    precision_plugin: Any
    side: Any
    follow_optimizers: Any
    _sigterm: Sigterm

    @contextmanager
    def _around(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        # The module is not called here (there is no wrapper), so the root unit's hooks do not see
        # a pass begin.
        with context, self.optimization.engine.scope():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(self.precision_plugin.train_step_context()):
            return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stop_evaluation()
        with self._around(self.precision_plugin.val_step_context()):
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stop_evaluation()
        with self._around(self.precision_plugin.test_step_context()):
            return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stop_evaluation()
        with self._around(self.precision_plugin.predict_step_context()):
            return self.lightning_module.predict_step(*args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are accumulating micro-batches."""
        return self.optimization.blocked()

    # ------------------------------------------------------------------ SIGTERM
    def on_train_start(self) -> None:
        self._sigterm.install()

    def on_validation_start(self) -> None:
        self._sigterm.install()

    def on_test_start(self) -> None:
        self._sigterm.install()

    def on_predict_start(self) -> None:
        self._sigterm.install()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sigterm.stop_if_agreed(self.side)
        self.follow_optimizers()

    def on_train_end(self) -> None:
        self._sigterm.forget()

    def _stop_evaluation(self) -> None:
        # Inside fit the ranks agree before the next training batch.
        if self.lightning_module.trainer.state.fn != self.ns.TrainerFn.FITTING:
            self._sigterm.stop_if_received()
