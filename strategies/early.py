"""Whether a unit may be stepped while backward still runs, as far as Lightning is concerned."""

from __future__ import annotations

from typing import Any

# Called between a backward and its step; whoever overrides one may read or change what is stepped.
_OF_MODULES = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")


def why_not_in_backward(module: Any, ns: Any) -> str | None:
    """Why no part of a step may be made in backward; ``None`` when the plain loop runs."""
    trainer = module.trainer
    if trainer.gradient_clip_val:
        return "gradients are clipped (Trainer(gradient_clip_val=...))"
    if not module.automatic_optimization:
        return "the module steps by itself (automatic_optimization=False)"
    for name in _OF_MODULES:
        if ns.is_overridden(name, module):
            return f"the module overrides {name}"
    for callback in trainer.callbacks:
        for name in _OF_CALLBACKS:
            if getattr(type(callback), name, None) is not getattr(ns.Callback, name):
                return f"the callback {type(callback).__name__} overrides {name}"
    return None
