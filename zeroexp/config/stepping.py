"""Whether a unit may be stepped before the gradients of all others are known."""

from __future__ import annotations

from zeroexp.config.tree import Config


def waits_for(config: Config, *, clips: bool | None = None) -> str | None:
    """The key whose value makes the first step wait for all gradients; None when none does.

    ``clips`` tells whether norms are clipped where the configuration does not decide that (a
    Trainer's own setting, an engine's argument).
    """
    precision = config.precision
    is_fp16 = precision.compute == "fp16"
    mode, nonfinite = precision.loss_scale.mode, precision.nonfinite
    if (config.trainer.gradient_clip_val is not None) if clips is None else clips:
        return "trainer.gradient_clip_val"
    if mode in ("dynamic", "static") or (mode == "auto" and is_fp16):
        return "precision.loss_scale.mode"
    if nonfinite == "skip" or (nonfinite == "auto" and is_fp16):
        return "precision.nonfinite"
    return None


def steps_in_backward(config: Config, *, clips: bool | None = None) -> bool:
    """Whether ``config`` asks for, or with ``auto`` allows, a step of each unit beside the rest of
    backward. ``clips`` as in :func:`waits_for`.

    Gradients that every rank needs (stage 0, replicas) wait for each other. What only an engine
    knows (a second optimizer, a step that does not follow the last micro-batch) comes on top.
    """
    offload = config.offload
    return (
        offload.optim_tier != "device"
        and config.zero.stage > 0  # where every rank steps everything, all gradients go to all
        and config.shard_size == config.data_ranks  # replicas sum their gradients first
        and offload.step_in_backward != "false"
        and not offload.delayed_update
        and not config.pipeline.is_on  # stages are stepped together
        and waits_for(config, clips=clips) is None
    )
