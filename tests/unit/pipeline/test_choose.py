"""``auto``: what wins under which memory, why others lost, and that the search only improves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from zeroexp.errors import ConfigError, ScheduleError
from zeroexp.pipeline.action import Action, Entry, Kind
from zeroexp.pipeline.choose import LISTED_V, SEARCHED, Choice, choose, costs_of
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.cut import Layer, cut
from zeroexp.pipeline.schedule import Schedule, loop_ranks, v_ranks
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.search import LISTED, improve, list_schedule
from zeroexp.pipeline.simulate import simulate
from zeroexp.pipeline.validate import validate


def even(num_layers: int) -> list[Layer]:
    """F = I = W = 1 a layer, 12 bytes of activations."""
    return [Layer(f"block{i}", 1, 1, 1, 1, 12, 1) for i in range(num_layers)]


def uneven(seed: int, num_layers: int = 8) -> list[Layer]:
    draw = random.Random(seed)
    return [
        Layer(
            f"block{i}",
            1,
            draw.uniform(1, 2),
            draw.uniform(1, 2),
            draw.uniform(0.5, 1.5),
            draw.randint(5, 15),
            10,
        )
        for i in range(num_layers)
    ]


def reasons(choice: Choice) -> dict[str, str]:
    return {f"{x.name} {x.virtual}": x.reason for x in choice.lost}


def test_zero_bubble_wins_where_its_terms_hold() -> None:
    """F = I = W, memory of 1F1B: ZB-V has only the fill, (p-1)F/v; the costs are whole layers."""
    choice = choose(even(8), 4, 8, memory=4 * 2 * 12, search=False)
    assert (choice.won.name, choice.won.virtual) == ("zb_v", 2)
    assert choice.won.simulation.makespan == 8 * 6 + 3
    why = reasons(choice)
    assert why["gpipe 1"] == "activations take 192 bytes on a rank, the limit is 96"
    assert why["1f1b 1"] == "66 a step, 29.4% more (27.3% idle)"
    assert "stages are more than the model's 8 layers" in why["interleaved 3"]
    assert {x.name for x in choice.lost} == set(RECIPES) - {"zb_v"}
    assert str(choice).startswith("zb_v with 2 stages per rank: 51 a step, 5.9% idle")


def test_without_a_split_the_interleaved_order_wins() -> None:
    """Interleaved and breadth-first have one bubble; the first holds less."""
    choice = choose(even(8), 4, 8, split_backward=False, search=False)
    assert (choice.won.name, choice.won.virtual) == ("interleaved", 2)
    assert choice.won.simulation.makespan == 8 * 6 + 3 * 6 / 2
    assert reasons(choice)["breadth_first 2"] == (
        "the same step with 192 bytes of activations on a rank"
    )
    kinds = {a.kind for r in range(4) for _, a in choice.schedule.actions(r)}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def test_a_slow_wire_is_against_many_stages() -> None:
    """Every boundary costs as much as a stage's whole work: fewer boundaries win."""
    free = choose(even(8), 2, 4, split_backward=False, search=False)
    slow = choose(even(8), 2, 4, split_backward=False, search=False, latency=24)
    assert free.won.virtual > slow.won.virtual == 1


def test_nothing_fits() -> None:
    """The message has what the most frugal one needs: 4 micro-batches of a rank's 2 layers."""
    with pytest.raises(ConfigError) as caught:
        choose(even(8), 4, 8, memory=50, search=False)
    text = str(caught.value)
    assert "no schedule keeps its activations within 50 bytes per rank" in text
    assert "needs the least, 96" in text
    with pytest.raises(ConfigError, match=r"no schedule can be made: 1f1b: .* more than the model"):
        choose(even(3), 4, 8)


def test_costs_of_stages_are_sums_of_layers() -> None:
    layers = [Layer("a", 1, 1, 2, 3, 4, 100), Layer("b", 1, 10, 20, 30, 40, 200)]
    layers.append(Layer("c", 1, 5, 5, 5, 5, 5))
    costs = costs_of(layers, cut(layers, 2, [2, 1]), latency=7, seconds_per_byte=0.5)
    assert costs == Costs((11, 5), (22, 5), (33, 5), (44, 5), (107,), (200,))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_never_worse_and_fits(seed: int) -> None:
    """With the memory of 1F1B and uneven costs: valid, within memory, at least as fast as all
    known schedules that fit, and the same every time."""
    layers = uneven(seed)
    memory = 1.01 * max(
        simulate(make_schedule("1f1b", 2, 4), costs_of(layers, cut(layers, 2, "time"))).peak_bytes
    )
    known = choose(layers, 2, 4, memory=memory, search=False)
    found = choose(layers, 2, 4, memory=memory)
    won = found.won.simulation
    validate(found.schedule)
    assert won.makespan <= known.won.simulation.makespan
    assert max(won.peak_bytes) <= memory
    again = simulate(found.schedule, won.costs)
    assert (again.makespan, again.peak_bytes) == (won.makespan, won.peak_bytes)
    assert choose(layers, 2, 4, memory=memory).schedule == found.schedule


def test_the_search_finds_what_no_table_has() -> None:
    """Over six uneven models, the found schedule is faster than every known one in most."""
    faster = 0
    for seed in range(6):
        known = choose(uneven(seed), 2, 4, search=False).won.simulation.makespan
        found = choose(uneven(seed), 2, 4).won
        if found.simulation.makespan < known * 0.9999:
            assert found.name in (LISTED, LISTED_V, SEARCHED)
            faster += 1
    assert faster >= 4


def every_order(stage: int, micro_batches: int) -> Iterator[tuple[Entry, ...]]:
    """All orders in which one stage can run its micro-batches, halves apart."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    for order in set(itertools.permutations([m for m in range(micro_batches) for _ in kinds])):
        seen = [0] * micro_batches
        actions = []
        for m in order:
            actions.append(Action(kinds[seen[m]], stage, m))
            seen[m] += 1
        yield tuple(actions)


def test_the_search_reaches_the_best_of_all_orders() -> None:
    """Two ranks, two micro-batches: all 400 pairs of orders are tried here."""
    draw = random.Random(4)
    for _ in range(4):
        costs = Costs(
            *(tuple(draw.randint(1, 9) for _ in range(2)) for _ in range(3)), (1, 1), (1,), (1,)
        )
        best = None
        for lists in itertools.product(every_order(0, 2), every_order(1, 2)):
            try:
                found = simulate(Schedule("any", (0, 1), 2, lists), costs).makespan
            except ScheduleError:  # the ranks block each other
                continue
            best = found if best is None else min(best, found)
        start = make_schedule("zb_h1", 2, 2)
        assert improve(start, costs).makespan == best


def test_a_list_schedule_keeps_its_limit() -> None:
    costs = Costs.uniform(4, 1, 1.2, 0.8, activations=10)
    for limit in (1, 2, 3, 4, 7):
        schedule = list_schedule(loop_ranks(4, 1), 8, costs, [limit] * 4)
        assert schedule is not None
        validate(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= limit
        in_bytes = list_schedule(loop_ranks(4, 1), 8, costs, [10 * limit] * 4, in_bytes=True)
        assert in_bytes == schedule
    assert list_schedule(loop_ranks(4, 1), 8, costs, [0.5] * 4) is None


@pytest.mark.parametrize("rank_of", [loop_ranks(3, 1), loop_ranks(3, 3), v_ranks(3)])
def test_a_list_schedule_needs_one_micro_batch_only(rank_of: tuple[int, ...]) -> None:
    """Several stages of a rank share its room: early forwards may not take all of it."""
    costs = Costs.uniform(len(rank_of), 3, 4, 2, transfer=1)
    for limit in (1, 1.5, 2, 3):
        for reluctance in (0, 0.6):
            schedule = list_schedule(rank_of, 6, costs, [limit] * 3, reluctance=reluctance)
            assert schedule is not None
            found = simulate(schedule, costs)  # validates it
            assert max(found.peak_activations) <= limit + 1e-9
    assert list_schedule(rank_of, 6, costs, [0.9] * 3) is None


def test_less_memory_never_makes_a_step_shorter() -> None:
    layers = uneven(11)
    steps = []
    for memory in (None, 400, 200, 120):
        steps.append(choose(layers, 2, 6, memory=memory, search=False).won.simulation.makespan)
    assert steps == sorted(steps)
