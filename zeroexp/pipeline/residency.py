"""Which stages are whole when ZeRO-3 works inside the pipeline: marks of gather, release, reduce.

A rank with several stages can hold few of them whole. How often it gathers follows from the order
of its list: breadth-first (arXiv:2211.05953) gathers each stage once per pass, an interleaved order
changes stages all the time and gathers again and again.
"""

from __future__ import annotations

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.action import MARKERS, Action, Entry, Exchange, Kind
from zeroexp.pipeline.schedule import Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def with_residency(schedule: Schedule, whole: int = 1) -> Schedule:
    """The same lists with UNSHARD before a stage is used, RESHARD when its place is needed or it is
    not used any more, REDUCE_GRADS after its last backward.

    At most ``whole`` stages of a rank are whole at a time. The one that is used last is released
    first, which no other rule undercuts in gathers (Belady, 1966).
    """
    if whole < 1:
        raise ConfigError(
            [Problem("pipeline.whole_stages", f"{whole} is not a count.", "Use 1 or more")]
        )
    plain = without_residency(schedule)
    return plain.with_lists([_marked(entries, whole) for entries in plain.lists])


def without_residency(schedule: Schedule) -> Schedule:
    """The same lists without those marks."""
    return schedule.with_lists(
        [
            [e for e in entries if isinstance(e, Exchange) or e.kind not in MARKERS]
            for entries in schedule.lists
        ]
    )


def num_unshards(schedule: Schedule, rank: int) -> int:
    """How often ``rank`` gathers a stage."""
    return sum(action.kind is Kind.UNSHARD for _, action in schedule.actions(rank))


def _marked(entries: tuple[Entry, ...], whole: int) -> list[Entry]:
    stages = [_stage_used(entry) for entry in entries]
    later = _next_uses(stages)
    last_backward = {
        entry.stage: i
        for i, entry in enumerate(entries)
        if isinstance(entry, Action) and entry.kind in _BACKWARDS
    }
    held: dict[int, int] = {}
    marked: list[Entry] = []
    for i, (entry, stage) in enumerate(zip(entries, stages, strict=True)):
        if stage is None:
            marked.append(entry)
            continue
        if stage not in held:
            if len(held) == whole:
                victim = max(held, key=lambda s: held[s])
                del held[victim]
                marked.append(Action(Kind.RESHARD, victim))
            marked.append(Action(Kind.UNSHARD, stage))
        held[stage] = later[i]
        marked.append(entry)
        if i == last_backward.get(stage):
            marked.append(Action(Kind.REDUCE_GRADS, stage))
        if later[i] == len(entries):
            del held[stage]
            marked.append(Action(Kind.RESHARD, stage))
    return marked


def _stage_used(entry: Entry) -> int | None:
    return entry.stage if isinstance(entry, Action) and entry.is_compute else None


def _next_uses(stages: list[int | None]) -> list[int]:
    """For each position the next one with the same stage; the length if there is none."""
    following: dict[int | None, int] = {}
    result = [len(stages)] * len(stages)
    for i in range(len(stages) - 1, -1, -1):
        result[i] = following.get(stages[i], len(stages))
        following[stages[i]] = i
    return result
