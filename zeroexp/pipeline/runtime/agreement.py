"""Before the first run: every rank can run its list, and all were given the same schedule."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from zeroexp.errors import ModelError, RankMismatch, ZeroexpError
from zeroexp.pipeline.runtime.channel import Channel
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.transfers import with_transfers
from zeroexp.pipeline.validate import validate


def agree(schedule: Schedule, channel: Channel, check: Callable[[Schedule], None]) -> Schedule:
    """The schedule with its transfers, valid and passed by ``check`` on every rank (collective).

    A rank with a problem raises it, the others a :class:`ModelError` that tells it.
    """
    problem: ZeroexpError | None = None
    try:
        if schedule.num_ranks > 1 and not schedule.has_transfers:
            schedule = with_transfers(schedule)
        validate(schedule)
        check(schedule)
    except ZeroexpError as error:
        problem = error
    lists = zlib.crc32(str(schedule).encode())
    said = [schedule.name, list(schedule.rank_of), schedule.micro_batches, lists]
    note = [*said, None if problem is None else str(problem)]
    notes = channel.exchange_notes(note, "the pipeline's schedule")
    if problem is not None:
        raise problem
    for rank, (*theirs, wrong) in zip(channel.ranks, notes, strict=True):
        if wrong is not None:
            raise ModelError(f"rank {rank}: {wrong}")
        if theirs != said:
            raise RankMismatch(
                f"rank {rank} was given schedule {_named(theirs)}, rank {channel.rank} "
                f"{_named(said)}: give every rank the same"
            )
    return schedule


def _named(said: Sequence[Any]) -> str:
    name, ranks, micro_batches, lists = said
    return f"{name} (stages on ranks {ranks}, {micro_batches} micro-batches, lists {lists:08x})"
