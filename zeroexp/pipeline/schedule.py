"""A pipeline schedule: for every rank the list of actions that it runs, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import Action, Entry, actions_of, format_list

Lists = tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """``rank_of[s]`` is the rank that holds stage s, ``lists[r]`` what rank r does.

    Stages are those of the model: with ``virtual`` stages per rank there are ranks x virtual.
    """

    name: str
    rank_of: tuple[int, ...]
    micro_batches: int
    lists: Lists

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ScheduleError(f"schedule {self.name} has {self.micro_batches} micro-batches")
        if set(self.rank_of) != set(range(len(self.lists))):
            raise ScheduleError(
                f"schedule {self.name}: stages are on ranks {sorted(set(self.rank_of))}, but there "
                f"are lists of ranks 0 to {len(self.lists) - 1}; every rank holds a stage"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.lists)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def virtual(self) -> int:
        """Stages per rank (of the rank with most)."""
        return max(self.rank_of.count(rank) for rank in range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in the model's order."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages ``stage`` is, from 0."""
        return self.rank_of[:stage].count(self.rank_of[stage])

    def actions(self, rank: int) -> Iterator[tuple[int, Action]]:
        """(position, action) of a rank's list, exchanges taken apart."""
        for position, entry in enumerate(self.lists[rank]):
            for action in actions_of(entry):
                yield position, action

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives are written down (see :mod:`zeroexp.pipeline.transfers`)."""
        return any(a.is_transfer for r in range(self.num_ranks) for _, a in self.actions(r))

    def with_lists(self, lists: Sequence[Sequence[Entry]]) -> Schedule:
        return replace(self, lists=tuple(map(tuple, lists)))

    def __str__(self) -> str:
        return "\n".join(
            f"rank {r}: {format_list(entries)}" for r, entries in enumerate(self.lists)
        )


def loop_ranks(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: the model goes round the ranks ``virtual`` times (Narayanan et
    al., arXiv:2104.04473, section 2.2)."""
    return tuple(range(ranks)) * virtual


def v_ranks(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: the first rank holds the first and the last stage (Qi et al.,
    arXiv:2401.10241, section 6)."""
    return (*range(ranks), *reversed(range(ranks)))
