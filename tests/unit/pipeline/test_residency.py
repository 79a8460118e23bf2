"""Gathers of ZeRO-3 inside a stage: how many each order costs."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from zeroexp.errors import ConfigError
from zeroexp.pipeline.action import Action, Kind, parse_list
from zeroexp.pipeline.residency import num_unshards, with_residency, without_residency
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.transfers import with_transfers
from zeroexp.pipeline.validate import validate


def test_breadth_first_gathers_once_per_pass() -> None:
    """v forwards and v backwards, of which the stage at the turn is gathered once for both."""
    for virtual in (1, 2, 3, 4):
        marked = with_residency(make_schedule("breadth_first", 3, 5, virtual))
        assert [num_unshards(marked, rank) for rank in range(3)] == [2 * virtual - 1] * 3


def test_one_stage_per_rank_stays_whole() -> None:
    marked = with_residency(make_schedule("1f1b", 2, 2))
    assert str(marked).splitlines()[0] == "rank 0: U0 F0.0 F0.1 B0.0 B0.1 G0 R0"


def test_an_interleaved_order_gathers_again_and_again() -> None:
    """Every change of stage costs a gather when one stage fits, none but the first when all do."""
    schedule = make_schedule("interleaved", 2, 4, 2)
    stages = [a.stage for _, a in schedule.actions(0)]
    changes = sum(a != b for a, b in itertools.pairwise(stages))
    assert num_unshards(with_residency(schedule, 1), 0) == changes + 1
    assert num_unshards(with_residency(schedule, 2), 0) == 2


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("whole", [1, 2])
def test_marks_are_valid_with_and_without_transfers(name: str, whole: int) -> None:
    schedule = make_schedule(name, 3, 6)
    marked = with_residency(schedule, whole)
    for each in (marked, with_transfers(marked), with_residency(with_transfers(schedule), whole)):
        validate(each)
    assert without_residency(marked) == schedule
    for rank in range(3):
        held: set[int] = set()
        reduced = []
        for _, action in marked.actions(rank):
            if action.kind is Kind.UNSHARD:
                held.add(action.stage)
            elif action.kind is Kind.RESHARD:
                held.remove(action.stage)
            elif action.kind is Kind.REDUCE_GRADS:
                reduced.append(action.stage)
            assert len(held) <= whole
        assert sorted(reduced) == list(schedule.stages_of(rank))


def fewest_gathers(uses: tuple[int, ...], whole: int) -> int:
    """By trying every release."""

    @functools.cache
    def from_here(i: int, held: frozenset[int]) -> int:
        if i == len(uses):
            return 0
        if uses[i] in held:
            return from_here(i + 1, held)
        kept = [held] if len(held) < whole else [held - {one} for one in held]
        return 1 + min(from_here(i + 1, rest | {uses[i]}) for rest in kept)

    return from_here(0, frozenset())


def test_no_other_release_gathers_less() -> None:
    draw = random.Random(3)
    for _ in range(60):
        uses = tuple(draw.randrange(4) for _ in range(12))
        # An order of forwards is enough: the pass looks at stages only.
        entries = tuple(Action(Kind.FORWARD, s, m) for m, s in enumerate(uses))
        for whole in (1, 2, 3):
            schedule = Schedule("uses", (0, 0, 0, 0), 12, (entries,))
            marked = with_residency(schedule, whole)
            assert num_unshards(marked, 0) == fewest_gathers(uses, whole)


def test_room_for_no_stage() -> None:
    with pytest.raises(ConfigError, match="0 is not a count"):
        with_residency(Schedule("one", (0,), 1, (parse_list("F0.0 B0.0"),)), 0)
