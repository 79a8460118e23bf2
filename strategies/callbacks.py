"""Lightning's own callbacks that read or write whole parameters.

Between uses a sharded parameter is a placeholder, so a callback that averages or copies parameters
needs them whole. The two weight averaging callbacks get them whole for the duration of their
hooks; pruning, which replaces parameters, is refused. Each refusal names the callback and what to
do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from zeroexp.errors import ModelError
from zeroexp.strategies.compat import Namespace

# Hooks that touch the module's parameters.
_SWA_HOOKS = ("on_train_epoch_start", "on_train_end")
_AVERAGING_HOOKS = ("on_train_end", "on_validation_epoch_start", "on_validation_epoch_end")


def refuse_unsupported(trainer: Any, ns: Namespace, *, piped: bool = False) -> None:
    """Raise :class:`ModelError` for a callback that cannot work on sharded parameters, or on those
    of a pipeline (``piped``), which no rank has together."""
    for callback in trainer.callbacks:
        if isinstance(callback, ns.ModelPruning):
            raise ModelError(
                f"{type(callback).__name__} replaces parameters of the model, which ZeroStrategy"
                " cannot follow: prune before fit (torch.nn.utils.prune) and remove the callback"
            )
        if piped and _averages(callback, ns):
            raise ModelError(
                f"{type(callback).__name__} averages the whole model, which no rank of a pipeline"
                " has: average checkpoints afterwards, or train without a pipeline"
            )


def _averages(callback: Any, ns: Namespace) -> bool:
    kinds = [ns.StochasticWeightAveraging, ns.WeightAveraging]
    return isinstance(callback, tuple(kind for kind in kinds if kind is not None))


Whole = Callable[[int | None], AbstractContextManager[Any]]
"""Makes a context in which the module's parameters are whole. The edits of the rank are kept."""


def adapt(trainer: Any, whole: Whole, exact: bool, ns: Namespace) -> list[Any]:
    """Let weight averaging callbacks see whole parameters; returns what :func:`restore` takes.

    Args:
        whole: makes the contexts.
        exact: whether the parameters are the weights themselves (no master copy in another dtype).

    Raises:
        ModelError: averaging where the parameters are rounded copies of master weights.
    """
    adapted = []
    for callback in trainer.callbacks:
        if not _averages(callback, ns):
            continue
        if not exact:
            raise ModelError(
                f"{type(callback).__name__} swaps parameters in and out, and with this precision"
                " they are rounded copies of the fp32 master weights: every swap would lose bits."
                " Train with precision='32-true', or average checkpoints afterwards"
            )
        stochastic = isinstance(callback, ns.StochasticWeightAveraging)
        adapted.append(callback)
        _wrap_hooks(callback, _SWA_HOOKS if stochastic else _AVERAGING_HOOKS, partial(whole, 0))
        average = getattr(callback, "_average_model", None)
        if not stochastic and average is not None:
            # Only when it averages, which is not after every batch.
            average.update_parameters = _inside(average.update_parameters, partial(whole, None))
    return adapted


def _inside(call: Callable[..., Any], whole: Callable[[], AbstractContextManager[Any]]) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with whole():
            return call(*args, **kwargs)

    return wrapped


def _wrap_hooks(
    callback: Any, hooks: tuple[str, ...], whole: Callable[[], AbstractContextManager[Any]]
) -> None:
    # A subclass under the same name: Lightning keys the callback's saved state by its class's name.
    kind = type(callback)

    def inside(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            with whole():
                return getattr(kind, name)(self, *args, **kwargs)

        return hook

    members: dict[str, Any] = {name: inside(name) for name in hooks}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members["_zeroexp_kind"] = kind
    callback.__class__ = type(kind.__name__, (kind,), members)


def restore(adapted: list[Any]) -> None:
    """Undo :func:`adapt`."""
    for callback in adapted:
        callback.__class__ = callback._zeroexp_kind
        average = getattr(callback, "_average_model", None)
        if average is not None:
            vars(average).pop("update_parameters", None)
    adapted.clear()
