"""Rules of dtypes, master weights and loss scale."""

from __future__ import annotations

from zeroexp.config.rules.rule import Rule, differs
from zeroexp.config.tree import Config
from zeroexp.config.value import show

_SCALE = "precision.loss_scale"


def _scaling(c: Config) -> str:
    """The loss scale mode in effect; ``auto`` compute is never fp16."""
    mode = c.precision.loss_scale.mode
    return mode if mode != "auto" else ("dynamic" if c.precision.compute == "fp16" else "off")


def _needs_scale(name: str) -> Rule:
    path = f"{_SCALE}.{name}"
    return Rule(
        key=path,
        why="keys of the loss scale need one",
        reads=(path, f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: _scaling(c) == "off" and differs(c, path),
        problem=lambda c: (
            f"does nothing: no loss scale with compute={c.precision.compute}."
            if c.precision.loss_scale.mode == "auto"
            else "does nothing with mode=off."
        ),
        fix=lambda c: "Use precision=fp16, or leave the key out",
    )


def _needs_dynamic(name: str) -> Rule:
    path = f"{_SCALE}.{name}"
    return Rule(
        key=path,
        why="a static loss scale never moves",
        reads=(path, f"{_SCALE}.mode"),
        broken=lambda c: c.precision.loss_scale.mode == "static" and differs(c, path),
        problem=lambda c: "does nothing with mode=static.",
        fix=lambda c: "Use precision.loss_scale.mode=dynamic, or leave the key out",
    )


_DYNAMIC = ("growth", "backoff", "interval", "hysteresis", "floor")

PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        key="precision.master",
        why="fp16 alone loses small updates and underflows in Adam's second moment",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "none" and c.precision.compute == "fp16",
        problem=lambda c: "fp16 cannot be stepped without an fp32 master.",
        fix=lambda c: "Use precision.master=fp32, or precision=bf16_pure",
    ),
    Rule(
        key="precision.master",
        why="training without a master copy is asked for by name, not left to the machine",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "none" and c.precision.compute == "auto",
        problem=lambda c: "none with compute=auto would depend on the machine.",
        fix=lambda c: "Use precision=bf16_pure, or name precision.compute",
    ),
    Rule(
        key="precision.master",
        why="fp64 parameters are their own master",
        reads=("precision.master", "precision.compute"),
        broken=lambda c: c.precision.master == "fp32" and c.precision.compute == "fp64",
        problem=lambda c: "fp32 is narrower than compute=fp64.",
        fix=lambda c: "Leave precision.master out",
    ),
    Rule(
        key=f"{_SCALE}.mode",
        why="bf16 has the range of fp32 and needs no loss scale",
        reads=(f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: (
            c.precision.loss_scale.mode in ("dynamic", "static")
            and c.precision.compute in ("bf16", "auto")
        ),
        problem=lambda c: (
            f"{c.precision.loss_scale.mode} is not for compute={c.precision.compute}."
        ),
        fix=lambda c: "bf16 has the range of fp32; use precision=fp16, or leave the loss scale out",
    ),
    Rule(
        key="precision.nonfinite",
        why="a dynamic loss scale finds its value by skipping steps",
        reads=("precision.nonfinite", f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: c.precision.nonfinite == "apply" and _scaling(c) == "dynamic",
        problem=lambda c: "apply would write overflowed gradients into the weights.",
        fix=lambda c: "Use precision.nonfinite=skip, or precision.loss_scale.mode=static",
    ),
    Rule(
        key=f"{_SCALE}.floor",
        why="the first loss scale is not below the smallest",
        reads=(f"{_SCALE}.floor", f"{_SCALE}.init", f"{_SCALE}.mode", "precision.compute"),
        broken=lambda c: (
            _scaling(c) == "dynamic" and c.precision.loss_scale.floor > c.precision.loss_scale.init
        ),
        problem=lambda c: f"{show(c.precision.loss_scale.floor)} is above the first scale.",
        fix=lambda c: f"Use at most precision.loss_scale.init, {show(c.precision.loss_scale.init)}",
    ),
    *(_needs_scale(name) for name in ("init", *_DYNAMIC)),
    *(_needs_dynamic(name) for name in _DYNAMIC),
)
