"""The published clock of every schedule: makespan and span above the ideal, activations alive.

GPipe and 1F1B: arXiv:2104.04473; interleaved: 2104.04473 and 2205.05198; ZB-H1, ZB-V and lists by a
greedy scheduler: arXiv:2401.10241. Units: F = 1 of a rank's whole share, activations in
micro-batches of it. The values are those of the papers' formulas and of replays of independent
implementations of the same schedules.
"""

from __future__ import annotations

import pytest

from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedule import loop_ranks
from zeroexp.pipeline.schedules import make_schedule
from zeroexp.pipeline.search import list_schedule
from zeroexp.pipeline.simulate import Simulation, simulate
from zeroexp.pipeline.transfers import with_transfers

EVEN, UNEVEN = (1, 1, 1), (1, 1.2, 0.8)
CASES = [(4, 8, EVEN), (4, 8, UNEVEN), (8, 32, EVEN), (8, 32, UNEVEN)]

# (name, stages per rank): one triple for each of CASES.
TABLE = {
    ("gpipe", 1): "9/9/8 9/9/8 21/21/32 21/21/32",
    ("1f1b", 1): "9/9/4 9/9/4 21/21/8 21/21/8",
    ("interleaved", 2): "4.5/4.5/5.5 4.5/4.5/5.5 10.5/10.5/11.5 10.5/10.5/11.5",
    ("interleaved", 4): "2.25/2.25/4.75 2.25/2.25/4.75 5.25/5.25/9.75 5.25/5.25/9.75",
    ("zb_h1", 1): "3/3/4 4.2/4.2/4 7/7/8 9.8/9.8/8",
    ("zb_h1", 2): "1.5/1.5/4 2.1/2.1/4 3.5/3.5/8 4.9/4.9/8",
    ("zb_v", 2): "1.5/0/4 1.8/1.2/4 3.5/0/8 4.2/2.8/8",
    ("dualpipe_v", 2): "1.5/1.5/4.5 2.1/2.1/4.5 3.5/3.5/8.5 5.1/5.1/8.5",
}
# List schedules by the activations that they may hold: p, and 2p-1.
LISTED = {
    "p": "3/3/4 6.2/6.2/4 7/7/8 15/15/8",
    "2p-1": "3/0/7 3/2.2/7 7/0/15 7/4.6/15",
}


def triple(simulation: Simulation, ideal: float) -> str:
    """To the last printed digit; more digits than the table has would show."""
    values = (
        simulation.makespan - ideal,
        max(simulation.span) - ideal,
        max(simulation.peak_activations),
    )
    return "/".join(f"{round(value, 6) + 0:g}" for value in values)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize(("name", "virtual"), TABLE)
def test_clock(name: str, virtual: int, case: int) -> None:
    ranks, micro_batches, costs = CASES[case]
    schedule = with_transfers(make_schedule(name, ranks, micro_batches, virtual))
    per_stage = Costs.uniform(ranks * virtual, *(cost / virtual for cost in costs))
    found = triple(simulate(schedule, per_stage), micro_batches * sum(costs))
    assert found == TABLE[name, virtual].split()[case]


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("limit", LISTED)
def test_clock_of_list_schedules(limit: str, case: int) -> None:
    ranks, micro_batches, costs = CASES[case]
    most = ranks if limit == "p" else 2 * ranks - 1
    uniform = Costs.uniform(ranks, *costs)
    schedule = list_schedule(loop_ranks(ranks, 1), micro_batches, uniform, [most] * ranks)
    assert schedule is not None
    found = triple(simulate(schedule, uniform), micro_batches * sum(costs))
    assert found == LISTED[limit].split()[case]


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 1), (3, 5, 4)])
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2), (3, 2), (4, 3), (6, 2)])
def test_closed_forms(ranks: int, rounds: int, costs: tuple[int, int, int]) -> None:
    """Bubbles by the papers' formulas, F, I, W those of a rank's share; integers, so exactly.

    ZB-H1's needs W no longer than F and I, or the drain is not filled.
    """
    forward, first, second = costs
    micro_batches, p = rounds * ranks, ranks
    for name, virtual, bubble in (
        ("gpipe", 1, (p - 1) * (forward + first + second)),
        ("1f1b", 1, (p - 1) * (forward + first + second)),
        ("interleaved", 2, (p - 1) * (forward + first + second)),
        ("interleaved", 3, (p - 1) * (forward + first + second)),
        ("breadth_first", 3, (p - 1) * (forward + first + second)),
        ("zb_h1", 1, (p - 1) * (forward + first - second)),
    ):
        if name == "zb_h1" and second > min(forward, first):
            continue
        schedule = make_schedule(name, ranks, micro_batches, virtual)
        # Whole numbers per stage: the rank's share is `virtual` times as much, and so is the
        # formula's bubble divided by `virtual`.
        found = simulate(schedule, Costs.uniform(ranks * virtual, *costs))
        assert found.makespan - micro_batches * virtual * sum(costs) == bubble, name
