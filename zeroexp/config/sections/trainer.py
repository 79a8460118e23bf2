"""trainer: ranks and steps. The keys mean what Lightning's mean."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How many ranks train for how long."""

    accelerator: str = setting(
        "auto",
        "where the model runs. auto: gpu where one is visible, else cpu.",
        changes="the device of every rank",
        choices=("auto", "cpu", "gpu"),
    )
    devices: int = setting(
        1,
        "ranks per node. One process each; under launch=external they exist already and are "
        "counted.",
        changes="data ranks, and with them state bytes per rank and the micro-batch",
        minimum=1,
    )
    num_nodes: int = setting(
        1,
        "number of machines.",
        changes="data ranks = devices x num_nodes",
        minimum=1,
    )
    max_steps: int = setting(
        100,
        "optimizer steps to train. -1: no limit, trainer.max_epochs ends the run.",
        changes="the length of the run and of schedules without total_steps",
        minimum=-1,
        unit="steps",
    )
    max_epochs: int | None = setting(
        None,
        "passes over the data to train. none: no limit, trainer.max_steps ends the run; else "
        "whichever comes first.",
        changes="the length of the run",
        minimum=1,
    )
    accumulate_grad_batches: int = setting(
        1,
        "micro-batches per rank and optimizer step.",
        changes="the micro-batch, or batch_size where micro_batch_size is given",
        minimum=1,
    )
    gradient_clip_val: float | None = setting(
        1.0,
        "largest global gradient norm. none or 0 does not clip.",
        changes="the update of steps with a larger norm",
        minimum=0,
        zero_is_off=True,
    )
    val_every: int | None = setting(
        None,
        "steps between validations. none: once, at the end.",
        changes="when val_loss is measured",
        minimum=1,
        unit="steps",
        digest=False,
    )
    val_batches: int = setting(
        10,
        "micro-batches per rank in one validation. 0 does not validate.",
        changes="how precise val_loss is",
        minimum=0,
    )
    log_every: int = setting(
        10,
        "steps between values sent to loggers and the progress line.",
        changes="how dense curves are",
        minimum=1,
        unit="steps",
        digest=False,
    )
    seed: int = setting(
        0,
        "seed of initial weights and dropout, and of data.seed where that is none.",
        changes="initial weights and every random draw",
        minimum=0,
        maximum=2**32 - 1,
    )
