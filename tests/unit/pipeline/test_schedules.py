"""Every generator: valid lists for all numbers, memory and traffic by formula, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.pipeline.machine import plays
from zeroexp.errors import ConfigError
from zeroexp.pipeline.action import SENDS, Kind
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.simulate import simulate
from zeroexp.pipeline.transfers import with_transfers, without_transfers
from zeroexp.pipeline.validate import validate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    recipe = RECIPES[draw(st.sampled_from(sorted(RECIPES)))]
    stages = draw(st.integers(1, 6))
    low, high = recipe.virtual
    virtual = draw(st.integers(low, min(high or 4, 4)))
    if recipe.rounds and virtual > 1:
        return recipe.make(stages, stages * draw(st.integers(1, 3)), virtual)
    return recipe.make(stages, draw(st.integers(1, 14)), virtual)


@settings(deadline=None, max_examples=80)
@given(schedules())
def test_every_list_is_valid(schedule: Schedule) -> None:
    validate(schedule, transfers=False)
    written = with_transfers(schedule)
    validate(written, transfers=True)
    assert plays(written)
    assert without_transfers(written) == schedule
    assert with_transfers(written) == written


def test_1f1b_as_drawn() -> None:
    assert str(make_schedule("1f1b", 2, 3)) == (
        "rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nrank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    )


def test_zb_h1_as_drawn() -> None:
    """The second half of a backward of rank r is r micro-batches late."""
    assert str(make_schedule("zb_h1", 2, 3)) == (
        "rank 0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2\n"
        "rank 1: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"
    )


def test_breadth_first_runs_a_stage_to_its_end() -> None:
    assert str(make_schedule("breadth_first", 2, 2, 2)).splitlines()[0] == (
        "rank 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    )


def test_interleaved_takes_turns_in_groups_of_the_ranks() -> None:
    """arXiv:2104.04473, figure 4: p micro-batches of a stage, then of the next one; rank 0 of 2
    warms up with 2(p-1) + (v-1)p = 4 forwards."""
    assert str(make_schedule("interleaved", 2, 4, 2)).splitlines()[0] == (
        "rank 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )


def test_an_activation_and_a_gradient_cross_together_in_1f1b() -> None:
    """Rank 1 of 3 in its steady state: both neighbours are met with a send and a receive."""
    line = str(with_transfers(make_schedule("1f1b", 3, 4))).splitlines()[1]
    assert "F1.2 SA1.2+RG1.1 B1.1" in line
    assert "RA1.3+SG1.1 F1.3" in line


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    """1F1B holds min(m, p - r), GPipe all of them, zero-bubble schedules at most p."""
    p, m = stages, micro_batches
    peaks = {
        name: simulate((schedule := make_schedule(name, p, m)), Costs.uniform(schedule.num_stages))
        for name in ("1f1b", "gpipe", "zb_h1", "zb_v")
    }
    assert peaks["1f1b"].peak_in_flight == tuple(min(m, p - r) for r in range(p))
    assert peaks["gpipe"].peak_in_flight == (m,) * p
    assert max(peaks["zb_h1"].peak_activations) <= p
    assert max(peaks["zb_v"].peak_activations) <= p


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_activations_of_interleaved(stages: int, virtual: int) -> None:
    """p(1 + (p-1)/(pv)) micro-batches (arXiv:2205.05198)."""
    schedule = make_schedule("interleaved", stages, 4 * stages, virtual)
    found = simulate(schedule, Costs.uniform(schedule.num_stages))
    expected = stages * (1 + (stages - 1) / (stages * virtual))
    assert max(found.peak_activations) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "virtual", "boundaries"),
    [("gpipe", 1, 3), ("1f1b", 1, 3), ("zb_h1", 1, 3), ("interleaved", 2, 7), ("zb_v", 2, 6)],
)
def test_tensors_sent(name: str, virtual: int, boundaries: int) -> None:
    """2m tensors per boundary between ranks; the V's turn is inside a rank (4 ranks)."""
    m, size = 8, 10
    schedule = make_schedule(name, 4, m, virtual)
    written = with_transfers(schedule)
    costs = Costs.uniform(4 * virtual, sent=size)
    for each in (schedule, written):
        found = simulate(each, costs)
        assert sum(found.sends) == 2 * m * boundaries
        assert sum(found.sent_bytes) == 2 * m * boundaries * size
    sends = [a for r in range(4) for _, a in written.actions(r) if a.kind in SENDS]
    assert len(sends) == 2 * m * boundaries


def test_the_ends_of_the_pipe() -> None:
    """The first stage sends no gradient and receives no activation, the last the reverse."""
    written = with_transfers(make_schedule("1f1b", 4, 6))
    first = {action.kind for _, action in written.actions(0)}
    last = {action.kind for _, action in written.actions(3)}
    assert not first & {Kind.SEND_GRADIENT, Kind.RECV_ACTIVATION}
    assert not last & {Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 6, 2), "pipeline.micro_batches.* 6 is not divisible.*Use 4 or 8"),
        (("interleaved", 4, 3, 2), "not divisible by 4 ranks.*Use 4$"),
        (("zb_h1", 4, 6, 2), "pipeline.micro_batches.*Use 4 or 8"),
        (("1f1b", 4, 8, 2), "pipeline.virtual.*2 stages per rank do not fit 1f1b.*interleaved"),
        (("interleaved", 4, 8, 1), "1 stage per rank does not fit.*Use pipeline.virtual=2 or more"),
        (("zb_v", 4, 8, 3), "Use pipeline.virtual=2$"),
        (("gpipe", 0, 8, 1), "pipeline.stages.* 0 is not a count"),
        (("gpipe", 2, 0, 1), "pipeline.micro_batches.* 0 is not a count"),
        (("zigzag", 2, 2, 1), "pipeline.schedule.*no schedule zigzag.*1f1b gpipe"),
    ],
)
def test_numbers_that_do_not_fit(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(*arguments)
