"""The validator: each kind of fault by name, and its verdict against a machine that plays lists."""

from __future__ import annotations

import random

import pytest

from tests.unit.pipeline.machine import plays
from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import Action, Entry, Exchange, Kind, actions_of, parse_list
from zeroexp.pipeline.schedule import Schedule, loop_ranks
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.transfers import with_transfers
from zeroexp.pipeline.validate import validate


def hand_written(*lists: str, micro_batches: int = 1, virtual: int = 1) -> Schedule:
    ranks = loop_ranks(len(lists), virtual)
    return Schedule("mine", ranks, micro_batches, tuple(map(parse_list, lists)))


def refused(schedule: Schedule, transfers: bool | None = None) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, transfers=transfers)
    error = caught.value
    assert error.rank is not None and error.position is not None and error.action is not None
    where = f"rank {error.rank}, position {error.position}, {error.action}: "
    assert str(error).startswith(f"schedule {schedule.name}: {where}")
    return error


@pytest.mark.parametrize(
    ("lists", "where", "why"),
    [
        (("F0.0 B0.0", "B1.0"), (1, 1, "F1.0"), "is not in the list"),
        (("F0.0 B0.0", "F1.0"), (1, 1, "B1.0"), "every forward has a backward"),
        (("F0.0 B0.0 F0.0", "F1.0 B1.0"), (0, 2, "F0.0"), "is at position 0 already"),
        (("F0.0 B0.0", "F1.0 I1.0"), (1, 2, "W1.0"), "I1.0 is half of a backward"),
        (("F0.0 B0.0", "F1.0 W1.0"), (1, 2, "I1.0"), "W1.0 is half of a backward"),
        (("F0.0 B0.0", "F1.0 B1.0 W1.0"), (1, 2, "W1.0"), "repeats a backward done by B1.0"),
        (("F0.0 B0.0", "F1.0 W1.0 I1.0"), (1, 1, "W1.0"), "needs I1.0, which comes at position 2"),
        (("B0.0 F0.0", "F1.0 B1.0"), (0, 0, "B0.0"), "needs F0.0, which comes at position 1"),
        (("F0.0 F1.0 B0.0", "B1.0"), (0, 1, "F1.0"), "stage 1 is on rank 1"),
        (("F0.0 B0.0", "F1.0 B1.0 F2.0"), (1, 2, "F2.0"), "there are 2 stages"),
        (("F0.0 B0.0 F0.1", "F1.0 B1.0"), (0, 2, "F0.1"), "there are 1 micro-batches"),
        (
            ("F0.0 SA0.0 RG0.0 B0.0", "RA1.0 F1.0 B1.0"),
            (1, 3, "SG1.0"),
            "RG0.0 is its other side",
        ),
        (
            ("F0.0 RG0.0 SA0.0 B0.0", "RA1.0 F1.0 B1.0 SG1.0"),
            (0, 1, "RG0.0"),
            "deadlock: rank 0 at position 1 (RG0.0) waits for rank 1 to reach SG1.0; "
            "rank 1 at position 0 (RA1.0) waits for rank 0 to reach SA0.0",
        ),
        (
            ("F0.0 SA0.0 B0.0 RG0.0", "RA1.0 F1.0 B1.0 SG1.0"),
            (0, 2, "B0.0"),
            "needs RG0.0, which comes at position 3",
        ),
        (
            ("SA0.0 F0.0 RG0.0 B0.0", "RA1.0 F1.0 B1.0 SG1.0"),
            (0, 0, "SA0.0"),
            "needs F0.0, which comes at position 1",
        ),
    ],
)
def test_faults_by_name(lists: tuple[str, ...], where: tuple[int, int, str], why: str) -> None:
    error = refused(hand_written(*lists))
    assert (error.rank, error.position, error.action) == where
    assert why in str(error)


def test_a_transfer_that_nobody_needs() -> None:
    """The last stage has nobody to send to; stages on one rank send each other nothing."""
    lists = ("F0.0 SA0.0 RG0.0 B0.0", "RA1.0 F1.0 SA1.0 B1.0 SG1.0")
    assert "no other rank that needs it" in str(refused(hand_written(*lists)))
    turn = Schedule("turn", (0, 0), 1, (parse_list("F0.0 SA0.0 F1.0 B1.0 B0.0"),))
    assert "no other rank that needs it" in str(refused(turn))


def test_what_crosses_in_another_order_than_it_is_taken() -> None:
    lists = (
        "F0.0 F0.1 SA0.0 SA0.1 RG0.0 B0.0 RG0.1 B0.1",
        "RA1.1 RA1.0 F1.0 B1.0 SG1.0 F1.1 B1.1 SG1.1",
    )
    error = refused(hand_written(*lists, micro_batches=2))
    assert (error.rank, error.position, error.action) == (1, 0, "RA1.1")
    assert "receive 0 of rank 1 from rank 0, but send 0 there is SA0.0" in str(error)


def test_blocking_sends_of_1f1b_one_after_the_other() -> None:
    """The known trap: send after each action, receive before each. In the steady state both sides
    send. The same lists with the two transfers as one exchange pass."""

    def entries(rank: int, exchange: bool) -> list[Entry]:
        compute = make_schedule("1f1b", 2, 4).lists[rank]
        found: list[Entry] = []
        for action in (a for entry in compute for a in actions_of(entry)):
            stage, m = action.stage, action.micro_batch
            if rank == 0 and action.kind is Kind.FORWARD:
                found += [action, Action(Kind.SEND_ACTIVATION, stage, m)]
            elif rank == 0:
                found += [Action(Kind.RECV_GRADIENT, stage, m), action]
            elif action.kind is Kind.FORWARD:
                found += [Action(Kind.RECV_ACTIVATION, stage, m), action]
            else:
                found += [action, Action(Kind.SEND_GRADIENT, stage, m)]
        if not exchange:
            return found
        joined: list[Entry] = []
        for entry in found:
            last = joined[-1] if joined else None
            if (
                isinstance(last, Action)
                and isinstance(entry, Action)
                and last.is_transfer
                and entry.is_transfer
                and (last.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT))
            ):
                joined[-1] = Exchange((last, entry))
            else:
                joined.append(entry)
        return joined

    plain = make_schedule("1f1b", 2, 4)
    naive = plain.with_lists([entries(rank, exchange=False) for rank in (0, 1)])
    error = refused(naive)
    assert "deadlock: rank 0" in str(error) and "SA0.1) waits for rank 1" in str(error)
    assert "rank 1 at position 3 (SG1.0) waits for rank 0 to reach RG0.0" in str(error)
    assert not plays(naive)
    both = plain.with_lists([entries(rank, exchange=True) for rank in (0, 1)])
    validate(both)
    assert plays(both)


def test_ranks_that_wait_in_a_circle_of_three() -> None:
    """No two of them block each other: 0 waits for 1, 1 for 2, 2 for 0 (stage 3 is on rank 0)."""
    lists = (
        "F0.0 F3.0 B3.0 B0.0 F0.1 F3.1 B3.1 B0.1",
        "F1.1 F1.0 B1.0 B1.1",
        "F2.0 B2.0 F2.1 B2.1",
    )
    schedule = Schedule("ring", (0, 1, 2, 0), 2, tuple(map(parse_list, lists)))
    error = refused(schedule, transfers=False)
    text = str(error)
    assert (error.rank, error.position, error.action) == (0, 1, "F3.0")
    assert text.count("waits for") == 3
    assert "rank 2 at position 0 (F2.0) waits for rank 1 to reach F1.0" in text
    assert "rank 1 at position 0 (F1.1) waits for rank 0 to reach F0.1" in text


@pytest.mark.parametrize(
    ("first", "where", "why"),
    [
        ("F0.0 U0 B0.0 R0", (0, "F0.0"), "stage 0 is not gathered at this point"),
        ("U0 F0.0 B0.0", (3, "R0"), "the stage stays whole"),
        ("U0 F0.0 U0 B0.0 R0", (2, "U0"), "whole already"),
        ("U0 F0.0 B0.0 R0 R0", (4, "R0"), "not whole"),
        ("F0.0 G0 B0.0", (1, "G0"), "a backward follows at position 2"),
        ("F0.0 B0.0 G0 G0", (3, "G0"), "reduced before"),
    ],
)
def test_marks_of_residency(first: str, where: tuple[int, str], why: str) -> None:
    error = refused(hand_written(first, "F1.0 B1.0"))
    assert (error.rank, error.position, error.action) == (0, *where)
    assert why in str(error)


def test_reduction_is_of_all_stages_of_a_rank_or_none() -> None:
    schedule = hand_written("F0.0 F1.0 B1.0 G1 B0.0", virtual=2)
    error = refused(schedule)
    assert error.action == "G0"


# One of each kind, some with several stages per rank, small enough to play thousands of times.
SMALL = [("gpipe", 3, 4, 1), ("1f1b", 4, 5, 1), ("interleaved", 2, 4, 2), ("zb_h1", 3, 4, 1)]
SMALL += [
    ("zb_h1", 2, 4, 2),
    ("zb_v", 2, 4, 2),
    ("zb_v", 3, 3, 2),
    ("breadth_first", 2, 3, 2),
    ("dualpipe_v", 2, 5, 2),
]


def test_all_recipes_are_mutated() -> None:
    assert {name for name, *_ in SMALL} == set(RECIPES)


def position_of(schedule: Schedule, rank: int, name: str) -> int:
    return next(i for i, action in schedule.actions(rank) if str(action) == name)


@pytest.mark.parametrize("numbers", SMALL)
def test_a_dropped_action_is_named(numbers: tuple[str, int, int, int]) -> None:
    written = with_transfers(make_schedule(*numbers))
    for rank, entries in enumerate(written.lists):
        for position, entry in enumerate(entries):
            for action in actions_of(entry):
                rest = tuple(a for a in actions_of(entry) if a != action)
                left: list[Entry] = [rest[0] if len(rest) == 1 else Exchange(rest)] if rest else []
                lists = [list(e) for e in written.lists]
                lists[rank][position : position + 1] = left
                error = refused(written.with_lists(lists), transfers=True)
                assert (error.rank, error.action) == (rank, str(action))


@pytest.mark.parametrize("numbers", SMALL)
def test_a_repeated_action_is_named(numbers: tuple[str, int, int, int]) -> None:
    draw = random.Random(1)
    written = with_transfers(make_schedule(*numbers))
    for rank, entries in enumerate(written.lists):
        for position, entry in enumerate(entries):
            again = draw.randrange(position + 1, len(entries) + 1)
            lists = [list(e) for e in written.lists]
            lists[rank].insert(again, entry)
            error = refused(written.with_lists(lists), transfers=True)
            assert (error.rank, error.position) == (rank, again)
            assert error.action in map(str, actions_of(entry))


@pytest.mark.parametrize("numbers", SMALL)
def test_a_swap_across_a_dependency_is_named(numbers: tuple[str, int, int, int]) -> None:
    """F before its B or I, I before its W, a result before its send, a receive before its use."""
    written = with_transfers(make_schedule(*numbers))
    after = {"F": "BI", "I": "W", "RA": "F", "RG": "BI"}
    swaps = 0
    for rank, entries in enumerate(written.lists):
        for i, a in enumerate(entries):
            for j in range(i + 1, len(entries)):
                b = entries[j]
                if isinstance(a, Exchange) or isinstance(b, Exchange):
                    continue
                same = (a.stage, a.micro_batch) == (b.stage, b.micro_batch)
                sends = {"F": "SA", "B": "SG", "I": "SG"}.get(a.kind.value)
                needs = b.kind.value in after.get(a.kind.value, "") or b.kind.value == sends
                if not (same and needs):
                    continue
                lists = [list(e) for e in written.lists]
                lists[rank][i], lists[rank][j] = b, a
                error = refused(written.with_lists(lists), transfers=True)
                assert error.rank == rank and error.position is not None
                assert i <= error.position <= j, "an action between the two, or one of them"
                swaps += 1
    assert swaps > 10


@pytest.mark.parametrize("numbers", SMALL)
def test_verdict_is_that_of_the_machine(numbers: tuple[str, int, int, int]) -> None:
    """Random moves of entries: valid lists in another order pass, all others are refused."""
    draw = random.Random(2)
    written = with_transfers(make_schedule(*numbers))
    verdicts = []
    for _ in range(150):
        lists = [list(e) for e in written.lists]
        for _ in range(draw.choice((1, 1, 2, 3))):
            entries = draw.choice(lists)
            entry = entries.pop(draw.randrange(len(entries)))
            entries.insert(draw.randrange(len(entries) + 1), entry)
        mutant = written.with_lists(lists)
        try:
            validate(mutant, transfers=True)
        except ScheduleError:
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert verdicts[-1] == plays(mutant), str(mutant)
    assert any(verdicts) and not all(verdicts)


def test_a_schedule_needs_a_stage_on_every_rank() -> None:
    with pytest.raises(ScheduleError, match="every rank holds a stage"):
        Schedule("odd", (0, 2), 1, (parse_list("F0.0 B0.0"), ()))
    with pytest.raises(ScheduleError, match="0 micro-batches"):
        Schedule("none", (0,), 0, ((),))
