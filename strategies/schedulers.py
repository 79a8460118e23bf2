"""Learning rate schedules advance only with the steps that were applied.

Lightning steps a schedule after every optimizer step, also after one that was skipped because a
gradient overflowed. The schedule of such a step has to wait, or it runs ahead of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold_while(scheduler: Any, held: Callable[[], bool]) -> None:
    """Make ``scheduler.step`` do nothing while ``held()`` is true.

    The object's class becomes a subclass of the same name. Wrapping the bound method instead would
    put a function into ``scheduler.state_dict()``, which is the object's ``__dict__``.
    """
    kind = type(scheduler)
    if getattr(kind, "_zeroexp_held", None) is not None:
        kind = kind.__mro__[1]

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if held() else kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "step": step,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "_zeroexp_held": held,
        },
    )


def release(scheduler: Any) -> None:
    """Undo :func:`hold_while`."""
    kind = type(scheduler)
    if getattr(kind, "_zeroexp_held", None) is not None:
        scheduler.__class__ = kind.__mro__[1]
