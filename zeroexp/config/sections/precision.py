"""precision: dtypes of compute, master weights and gradients, non-finite values, loss scaling."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroexp.config.setting import setting

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True, slots=True)
class LossScaleConfig:
    """The factor on the loss that keeps small fp16 gradients from becoming zero."""

    mode: str = setting(
        "auto",
        "how the loss is scaled. auto: dynamic for fp16, off elsewhere; static keeps `init`.",
        changes="the loss scale, and which steps are skipped",
        choices=("auto", "dynamic", "static", "off"),
    )
    init: float = setting(
        65536.0,
        "first loss scale. Also the constant one of mode static.",
        changes="the loss scale of the first steps",
        above=0,
        maximum=2.0**24,  # where a dynamic scale stops growing: a scaled fp32 loss stays finite
    )
    growth: float = setting(
        2.0,
        "factor on the scale after `interval` good steps.",
        changes="how fast a dynamic scale recovers",
        minimum=1,
    )
    backoff: float = setting(
        0.5,
        "factor on the scale when gradients are not finite.",
        changes="how far a dynamic scale falls",
        above=0,
        below=1,
    )
    interval: int = setting(
        1000,
        "good steps in a row before the scale grows.",
        changes="how often a dynamic scale grows",
        minimum=1,
        unit="steps",
    )
    hysteresis: int = setting(
        2,
        "non-finite steps before the scale falls. The step is skipped each time; the scale falls "
        "at the last of them and after it at each one, until the scale grows again.",
        changes="whether a single outlier lowers the scale",
        minimum=1,
        unit="steps",
    )
    floor: float = setting(
        1.0,
        "smallest loss scale. A non-finite step at the floor ends the training with an error.",
        changes="when a diverging fp16 run stops",
        above=0,
    )


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """Dtypes, and what happens when a gradient is not finite."""

    compute: str = setting(
        "auto",
        "dtype of forward and backward. auto: bf16 where the device multiplies bf16 natively, "
        "else fp32.",
        changes="parameter bytes in use, speed and rounding",
        choices=("auto", *DTYPES),
    )
    master: str = setting(
        "auto",
        "dtype of the weights the optimizer steps. auto: fp32 unless compute is fp32 or fp64 "
        "already; none keeps no master copy (`precision=bf16_pure`).",
        changes="optimizer state bytes (4 per parameter) and whether small updates are lost",
        choices=("auto", "fp32", "none"),
    )
    reduce: str = setting(
        "auto",
        "dtype in which gradients travel. auto: fp32, or fp64 where compute is fp64.",
        changes="bytes of each gradient reduction, and rounding",
        choices=("auto", *DTYPES),
    )
    accumulate: str = setting(
        "auto",
        "dtype in which micro-batches are summed. auto: fp32, or fp64 where compute is fp64.",
        changes="gradient bytes per rank, and rounding with accumulation",
        choices=("auto", *DTYPES),
    )
    nonfinite: str = setting(
        "auto",
        "what a non-finite gradient does. stop the run with status nan, skip the step, or apply "
        "it; auto: skip for fp16, stop elsewhere.",
        changes="whether a run with a NaN ends, skips the step, or takes the NaN into the weights",
        choices=("auto", "stop", "skip", "apply"),
    )
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
