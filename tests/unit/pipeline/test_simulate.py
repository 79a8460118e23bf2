"""The simulator against longest paths and a sweep over the clock, both computed here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import Exchange
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.simulate import Simulation, simulate
from zeroexp.pipeline.transfers import with_transfers

SMALL = [("gpipe", 3, 4, 1), ("1f1b", 4, 5, 1), ("interleaved", 2, 4, 2), ("zb_h1", 3, 4, 1)]
SMALL += [
    ("zb_h1", 2, 4, 2),
    ("zb_v", 3, 5, 2),
    ("breadth_first", 2, 3, 3),
    ("dualpipe_v", 3, 6, 2),
    ("1f1b", 1, 3, 1),
]


def uneven(stages: int, seed: int, zero_transfer: bool = False) -> Costs:
    draw = random.Random(seed)

    def numbers(size: int, low: int = 1) -> tuple[int, ...]:
        return tuple(draw.randint(low, 9) for _ in range(size))

    transfer = (0,) * (stages - 1) if zero_transfer else numbers(stages - 1, 0)
    return Costs(
        numbers(stages),
        numbers(stages),
        numbers(stages),
        numbers(stages),
        transfer,
        numbers(stages - 1),
        kept=0.25,
    )


def duration(name: str, costs: Costs) -> float:
    stage = int(name[1:].split(".")[0])
    parts = {"F": (costs.forward,), "I": (costs.input_grad,), "W": (costs.weight_grad,)}
    parts["B"] = (costs.input_grad, costs.weight_grad)
    return sum(part[stage] for part in parts[name[0]])


def reads(name: str, stages: int, names: set[str]) -> list[str]:
    """The compute actions whose results ``name`` reads."""
    kind, (stage, m) = name[0], map(int, name[1:].split("."))
    if kind == "F":
        return [f"F{stage - 1}.{m}"] if stage else []
    if kind == "W":
        return [f"I{stage}.{m}"]
    later = f"B{stage + 1}.{m}" if f"B{stage + 1}.{m}" in names else f"I{stage + 1}.{m}"
    return [f"F{stage}.{m}"] + ([later] if stage + 1 < stages else [])


def longest_paths(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """End of every compute action: the longest path through order and dependencies, relaxed until
    nothing changes."""
    lists = [[str(a) for a in entries] for entries in schedule.lists]
    home = {name: rank for rank, names in enumerate(lists) for name in names}
    ends = dict.fromkeys(home, 0.0)
    changed = True
    while changed:
        changed = False
        for names in lists:
            for i, name in enumerate(names):
                start = ends[names[i - 1]] if i else 0.0
                for other in reads(name, schedule.num_stages, set(home)):
                    a, b = (int(n[1:].split(".")[0]) for n in (other, name))
                    way = costs.transfer[min(a, b)] if home[other] != home[name] else 0
                    start = max(start, ends[other] + way)
                if start + duration(name, costs) != ends[name]:
                    ends[name] = start + duration(name, costs)
                    changed = True
    return ends


def blocking_paths(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """The same where a transfer begins when both ranks are there and both go on at its end."""
    lists = [
        [[str(a) for a in e.actions] if isinstance(e, Exchange) else [str(e)] for e in entries]
        for entries in schedule.lists
    ]
    place = {name: (r, i) for r, es in enumerate(lists) for i, e in enumerate(es) for name in e}
    starts = {(r, i): 0.0 for r, entries in enumerate(lists) for i in range(len(entries))}
    ends = dict(starts)

    def other(name: str) -> tuple[str, int]:
        stage, m = map(int, name[2:].split("."))
        side = {"SA": "RA", "RA": "SA", "SG": "RG", "RG": "SG"}[name[:2]]
        peer = stage + 1 if name[:2] in ("SA", "RG") else stage - 1
        return f"{side}{peer}.{m}", min(stage, peer)

    changed = True
    while changed:
        changed = False
        for rank, entries in enumerate(lists):
            for i, names in enumerate(entries):
                here = rank, i
                starts[here] = ends[rank, i - 1] if i else 0.0
                if names[0][0] in "FBIW":
                    end = starts[here] + duration(names[0], costs)
                else:
                    end = 0.0
                    for name in names:
                        peer, boundary = other(name)
                        met = max(starts[here], starts[place[peer]])
                        end = max(end, met + costs.transfer[boundary])
                if end != ends[here]:
                    ends[here] = end
                    changed = True
    return {name: ends[where] for name, where in place.items() if name[0] in "FBIW"}


def ends_of(simulation: Simulation) -> dict[str, float]:
    return {str(t.action): t.end for line in simulation.timeline for t in line}


@pytest.mark.parametrize("numbers", SMALL)
@pytest.mark.parametrize(
    ("paths", "blocking"), [(longest_paths, False), (blocking_paths, True)], ids=["flow", "block"]
)
def test_every_end_is_the_longest_path(
    numbers: tuple[str, int, int, int],
    paths: Callable[[Schedule, Costs], dict[str, float]],
    blocking: bool,
) -> None:
    for seed in range(4):
        schedule = make_schedule(*numbers)
        schedule = with_transfers(schedule) if blocking else schedule
        costs = uneven(schedule.num_stages, seed)
        found = simulate(schedule, costs, blocking=blocking)
        expected = paths(schedule, costs)
        assert ends_of(found) == expected
        assert found.makespan == max(expected.values())


@pytest.mark.parametrize("numbers", SMALL)
def test_sums_and_peaks_by_a_sweep(numbers: tuple[str, int, int, int]) -> None:
    """Idle time from the boxes, activations from the intervals between forward and backward."""
    schedule = make_schedule(*numbers)
    costs = uneven(schedule.num_stages, 7)
    found = simulate(schedule, costs)
    for rank, line in enumerate(found.timeline):
        boxes = sum(t.end - t.start for t in line)
        assert found.busy[rank] == boxes
        assert found.idle[rank] == found.makespan - boxes
        assert found.span[rank] == line[-1].end - line[0].start
        assert found.bubble[rank] == found.span[rank] - boxes
        alive: list[tuple[float, float, int, float]] = []  # from, to, stage, share
        times = {str(t.action): t for t in line}
        for t in line:
            if t.action.kind.value != "F":
                continue
            key = f"{t.action.stage}.{t.action.micro_batch}"
            stage = t.action.stage
            if whole := times.get("B" + key):
                alive.append((t.start, whole.end, stage, 1))
            else:
                first, second = times["I" + key], times["W" + key]
                alive.append((t.start, first.end, stage, 1))
                alive.append((first.end, second.end, stage, costs.kept))
        moments = {interval[0] for interval in alive}

        def at(
            moment: float, intervals: list[tuple[float, float, int, float]]
        ) -> list[tuple[int, float]]:
            return [(s, share) for a, b, s, share in intervals if a <= moment < b]

        held = schedule.virtual
        now = [at(moment, alive) for moment in moments]
        assert found.peak_in_flight[rank] == max(len(x) for x in now)
        assert found.peak_activations[rank] == max(sum(share for _, share in x) for x in now) / held
        assert found.peak_bytes[rank] == max(
            sum(costs.activations[s] * share for s, share in x) for x in now
        )
    assert found.bubble_fraction == pytest.approx(
        1 - sum(found.busy) / (found.makespan * schedule.num_ranks), abs=1e-12
    )


def test_by_hand() -> None:
    """Two stages, two micro-batches, 1F1B; stage 1 is twice as slow and a transfer takes 1.

    Rank 0: F0 0-1, F1 1-2. Rank 1: F0 2-4, B0 4-8, F1 8-10, B1 10-14. Rank 0: B0 9-11, B1 15-17.
    """
    costs = Costs((1, 2), (1, 2), (1, 2), (10, 20), (1,), (5,))
    found = simulate(make_schedule("1f1b", 2, 2), costs)
    assert [(str(t.action), t.start, t.end) for t in found.timeline[0]] == [
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
        ("B0.0", 9, 11),
        ("B0.1", 15, 17),
    ]
    assert found.makespan == 17
    assert found.busy == (6, 12) and found.idle == (11, 5) and found.bubble == (11, 0)
    assert found.peak_bytes == (20, 20) and found.sent_bytes == (10, 10)


@pytest.mark.parametrize("numbers", SMALL)
def test_blocking_is_never_faster(numbers: tuple[str, int, int, int]) -> None:
    schedule = with_transfers(make_schedule(*numbers))
    for seed in range(3):
        costs = uneven(schedule.num_stages, seed)
        assert (
            simulate(schedule, costs, blocking=True).makespan >= simulate(schedule, costs).makespan
        )


@pytest.mark.parametrize("name", sorted({*RECIPES} - {"dualpipe_v"}))
def test_ranks_in_step_lose_nothing_to_blocking(name: str) -> None:
    """F = I = W and a free wire: no rank waits at a send or receive for longer than for its tensor.
    (The pairs of dualpipe_v would have to be one action for that.)"""
    schedule = with_transfers(make_schedule(name, 4, 8))
    costs = Costs.uniform(schedule.num_stages)
    assert simulate(schedule, costs, blocking=True).makespan == simulate(schedule, costs).makespan


def test_what_cannot_be_simulated() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="has 2 stages, the costs are those of 3"):
        simulate(schedule, Costs.uniform(3))
    with pytest.raises(ScheduleError, match=r"SA0\.0: is not in the list"):
        simulate(schedule, Costs.uniform(2), blocking=True)
    with pytest.raises(ScheduleError, match=r"F1\.1: is not in the list"):
        lists = [[e for e in entries if str(e) != "F1.1"] for entries in schedule.lists]
        simulate(schedule.with_lists(lists), Costs.uniform(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": (1, -1)}, "forward has a value that is negative"),
        ({"weight_grad": (1, float("nan"))}, "weight_grad has a value that is negative or not a"),
        ({"transfer": ()}, "2 stages need 1 values of transfer, not 0"),
        ({"kept": 1.5}, "kept is a share between 0 and 1"),
    ],
)
def test_costs_that_are_none(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "forward": (1, 1),
        "input_grad": (1, 1),
        "weight_grad": (1, 1),
        "activations": (0, 0),
        "transfer": (0,),
        "sent": (0,),
    }
    with pytest.raises(ScheduleError, match=message):
        Costs(**{**good, **changes})  # type: ignore[arg-type]
