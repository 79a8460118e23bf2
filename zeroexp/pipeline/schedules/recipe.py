"""A schedule that can be asked for by name: its generator and what it demands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.action import Action
from zeroexp.pipeline.schedule import Schedule, loop_ranks, v_ranks


@dataclass(frozen=True)
class Recipe:
    """``generate(stages, micro_batches, virtual)`` gives one list of compute actions per rank.

    ``virtual`` (lowest, highest; None: no limit) is how many stages a rank may hold, ``default``
    how many it holds if nothing is said. ``rounds``: with more than one stage per rank the
    micro-batches go in rounds of ``stages``, so their number is a multiple of it.
    """

    name: str
    generate: Callable[[int, int, int], Sequence[Sequence[Action]]]
    source: str
    splits_backward: bool = False
    virtual: tuple[int, int | None] = (1, 1)
    default: int = 1
    rounds: bool = False
    v_shape: bool = False

    def problems(self, stages: int, micro_batches: int, virtual: int) -> list[Problem]:
        """Why this schedule cannot be made of these numbers, and which numbers fit."""
        found = [
            Problem(f"pipeline.{key}", f"{number} is not a count.", "Use 1 or more")
            for key, number in (
                ("stages", stages),
                ("micro_batches", micro_batches),
                ("virtual", virtual),
            )
            if number < 1
        ]
        if found:
            return found
        low, high = self.virtual
        if virtual < low or (high is not None and virtual > high):
            found.append(
                Problem(
                    "pipeline.virtual",
                    f"{virtual} stage{'s' * (virtual > 1)} per rank do{'es' * (virtual == 1)} not "
                    f"fit {self.name}.",
                    self._virtual_fix(),
                )
            )
        elif self.rounds and virtual > 1 and micro_batches % stages:
            found.append(
                Problem(
                    "pipeline.micro_batches",
                    f"{micro_batches} is not divisible by {stages} ranks, as {self.name} with "
                    f"{virtual} stages per rank needs.",
                    f"Use {_multiples(micro_batches, stages)}",
                )
            )
        return found

    def _virtual_fix(self) -> str:
        low, high = self.virtual
        if low == high == 1:
            return "Use pipeline.virtual=1, or pipeline.schedule=interleaved or breadth_first"
        return f"Use pipeline.virtual={low}" + ("" if high == low else " or more")

    def make(self, stages: int, micro_batches: int, virtual: int | None = None) -> Schedule:
        """The schedule; :class:`ConfigError` with every problem if the numbers do not fit."""
        virtual = self.default if virtual is None else virtual
        problems = self.problems(stages, micro_batches, virtual)
        if problems:
            raise ConfigError(problems)
        ranks = v_ranks(stages) if self.v_shape else loop_ranks(stages, virtual)
        lists = self.generate(stages, micro_batches, virtual)
        return Schedule(self.name, ranks, micro_batches, tuple(map(tuple, lists)))


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else f"{of}"
