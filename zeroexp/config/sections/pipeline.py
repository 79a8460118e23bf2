"""pipeline: how the layers are spread over ranks, and in which order their work is done."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting
from zeroexp.pipeline.cut import WAYS
from zeroexp.pipeline.schedules import RECIPES, Recipe

AUTO = "auto"
SCHEDULES = (*RECIPES, AUTO)
"""Every value of `pipeline.schedule` that makes a pipeline."""

#: Micro-batches per rank of the pipe if nothing is said: 1F1B then idles (p-1)/(5p-1) of the time.
_PER_RANK = 4
#: Stages per rank that are tried if nothing is said.
_MOST_VIRTUAL = 4


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism: every rank of a pipe holds a part of the layers."""

    schedule: str = setting(
        "none",
        "order of the work of a step. none: every rank holds all layers; auto: the fastest that "
        "is known or found for the costs of the layers, within `memory_limit`. `zeroexp plan "
        "--timeline` draws it.",
        changes="idle time, activations alive and bytes between stages; never the weights beyond "
        "rounding",
        choices=("none", *SCHEDULES),
    )
    stages: int | None = setting(
        None,
        "ranks of one pipe. Each holds 1/stages of the layers, and ranks = data ranks x stages; 1 "
        "runs without a pipeline; none: 2.",
        changes="state bytes per rank, and data ranks",
        minimum=1,
    )
    micro_batches: int | None = setting(
        None,
        "parts that a rank's batch goes through the pipe in. It divides data.micro_batch_size; "
        f"none: the most that do, up to {_PER_RANK} x stages.",
        changes="idle time against the size of a part; rounding",
        minimum=1,
        kinds=SCHEDULES,
    )
    virtual: int | None = setting(
        None,
        "stages that every rank of the pipe holds. none: what the schedule needs; with auto: the "
        f"most that are tried, none is {_MOST_VIRTUAL}.",
        changes="idle time against bytes between stages",
        minimum=1,
        kinds=SCHEDULES,
    )
    cut: str | tuple[int, ...] = setting(
        "parameters",
        "what is even between stages. parameters, layers or time (measured on a sample), "
        "or the layers of every stage, as in [3,4,3].",
        changes="state bytes and time of each stage",
        choices=WAYS,
        minimum=1,
        kinds=SCHEDULES,
    )
    whole_stages: int = setting(
        1,
        "stages of a rank whose parameters are gathered at a time. Stage 3 with several stages per "
        "rank.",
        changes="peak bytes of gathered parameters against all-gathers",
        minimum=1,
        kinds=SCHEDULES,
    )
    memory_limit: int | None = setting(
        None,
        "bytes of activations per rank that auto stays below. Bytes, or a string with a binary "
        "unit; none: what the device has free, on the CPU no limit.",
        changes="the schedule that is chosen",
        minimum=1,
        unit="bytes",
        kinds=(AUTO,),
    )

    @property
    def size(self) -> int:
        """Ranks of one pipe; 1 without a pipeline."""
        if self.schedule == "none":
            return 1
        return 2 if self.stages is None else self.stages

    @property
    def is_on(self) -> bool:
        """Whether there is more than one rank to a pipe."""
        return self.size > 1

    @property
    def recipe(self) -> Recipe | None:
        """How the schedule is made; None for `none` and `auto`."""
        return RECIPES.get(self.schedule)

    @property
    def num_virtual(self) -> int:
        """Stages per rank; with `auto` the most that are tried."""
        if self.virtual is not None:
            return self.virtual
        if self.schedule == AUTO:
            return _MOST_VIRTUAL
        return self.recipe.default if self.recipe else 1

    def num_micro_batches(self, samples: int) -> int:
        """Parts that a rank's batch of ``samples`` is cut into: as given, or the most up to
        4 x stages that divide it and suit the schedule (1 where none does)."""
        if not self.is_on:
            return 1
        if self.micro_batches is not None:
            return self.micro_batches
        for count in range(min(_PER_RANK * self.size, samples), 0, -1):
            if samples % count == 0 and self._suits(count):
                return count
        return 1

    def _suits(self, micro_batches: int) -> bool:
        recipe = self.recipe
        return recipe is None or not recipe.problems(self.size, micro_batches, self.num_virtual)
