"""Timelines: exact text of small cases, width, and an SVG that everybody can read."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules import RECIPES, make_schedule
from zeroexp.pipeline.simulate import Simulation, simulate
from zeroexp.pipeline.timeline_svg import COLOURS, timeline_svg
from zeroexp.pipeline.timeline_text import timeline_text

SVG = "{http://www.w3.org/2000/svg}"
LEGEND = "F forward  B backward  I input gradient  W weight gradient  . idle"


def simulated(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Simulation:
    schedule = make_schedule(name, ranks, micro_batches, virtual)
    return simulate(schedule, Costs.uniform(schedule.num_stages))


def test_text_of_1f1b() -> None:
    assert timeline_text(simulated("1f1b", 2, 3)).splitlines() == [
        "rank 0 |F0F1....B0--F2B1--..B2--|  25% idle, 2 alive",
        "rank 1 |..F0B0--F1B1--F2B2--....|  25% idle, 1 alive",
        LEGEND,
    ]


def test_text_of_the_two_halves() -> None:
    """Halves are I and W; zb_v's second stage of a rank has small letters."""
    assert timeline_text(simulated("zb_h1", 2, 2)).splitlines()[:2] == [
        "rank 0 |F0F1..I0W0I1W1|  14% idle, 2 alive",
        "rank 1 |..F0I0F1I1W0W1|  14% idle, 1.5 alive",
    ]
    first = timeline_text(simulated("zb_v", 2, 2)).splitlines()
    assert first[0] == "rank 0 |F0F1..f0i0w0f1i1w1I0W0..I1W1|  14% idle, 1.5 alive"
    assert first[1] == "rank 1 |..F0f0F1f1i0w0I0W0i1w1I1W1..|  14% idle, 2 alive"
    assert first[3] == "small letters: every second stage of a rank"


def test_numbers_of_two_digits_get_their_room() -> None:
    line = timeline_text(simulated("gpipe", 1, 11), width=200).splitlines()[0]
    assert "|F0-F1-F2-" in line and "F9-F10B0----" in line


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("name", RECIPES)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    """Too little room for numbers: every box keeps its letter while it has a column."""
    lines = timeline_text(simulated(name, 4, 32), width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    ranks = lines[:4]
    assert len({line.index("|") for line in ranks}) == 1
    assert all(line.count("|") == 2 for line in ranks)


def test_a_schedule_that_costs_nothing() -> None:
    free = simulate(make_schedule("1f1b", 2, 2), Costs.uniform(2, 0, 0, 0))
    assert timeline_text(free).startswith("rank 0 |.|   0% idle")
    ElementTree.fromstring(timeline_svg(free))


@pytest.mark.parametrize("name", RECIPES)
def test_svg_has_a_box_for_every_action(name: str) -> None:
    simulation = simulated(name, 4, 8)
    root = ElementTree.fromstring(timeline_svg(simulation, width=1600))
    tips = [e.text for e in root.iter(f"{SVG}title")][1:]
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    actions = [timed for line in simulation.timeline for timed in line]
    assert len(boxes) == len(tips) == len(actions)
    for box, timed, tip in zip(boxes, actions, tips, strict=True):
        assert box is not None and tip is not None
        place = simulation.schedule.chunk_of(timed.action.stage) % 2
        assert box.get("fill") == COLOURS[timed.action.kind][place][0]
        assert f"stage {timed.action.stage}, micro-batch {timed.action.micro_batch}:" in tip
        # Where it stands: 60 pixels left of the plot, 1390 of plot.
        scale = (1600 - 60 - 150) / simulation.makespan
        assert float(box.get("x", 0)) == pytest.approx(60 + timed.start * scale, abs=0.01)
        assert float(box.get("width", 0)) == pytest.approx(
            (timed.end - timed.start) * scale, abs=0.01
        )


def test_svg_numbers_fit_their_boxes() -> None:
    """Narrow boxes have no number, the tooltip keeps it."""
    narrow = ElementTree.fromstring(timeline_svg(simulated("1f1b", 4, 200), width=600))
    assert not [g for g in narrow.iter(f"{SVG}g") if g.find(f"{SVG}text") is not None]
    wide = ElementTree.fromstring(timeline_svg(simulated("1f1b", 4, 8)))
    assert all(g.find(f"{SVG}text") is not None for g in wide.iter(f"{SVG}g"))


def test_svg_takes_any_name() -> None:
    plain = make_schedule("1f1b", 1, 1)
    named = Schedule("<&>", plain.rank_of, 1, plain.lists)
    root = ElementTree.fromstring(timeline_svg(simulate(named, Costs.uniform(1))))
    title = root.find(f"{SVG}title")
    assert title is not None and title.text == "<&>: 1 ranks, 1 stages, 1 micro-batches"


# Simulation of colour-vision deficiencies, full severity (Machado, Oliveira, Fernandes, 2009).
SIGHT = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* of linear sRGB, white D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) for row in matrix)

    def f(t: float) -> float:
        return t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116

    fx, fy, fz = f(x / 0.9505), f(y), f(z / 1.089)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    """A difference (CIE76) of 15 between any two, where about 2 can just be seen."""
    seen = {}
    for pair in COLOURS.values():
        for fill, _ in pair:
            rgb = linear(fill)
            mixed = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in SIGHT[sight]]
            seen[fill] = lab([min(1, max(0, c)) for c in mixed])
    for (_, a), (_, b) in itertools.combinations(seen.items(), 2):
        assert sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5 > 15


def test_numbers_can_be_read_on_their_boxes() -> None:
    """Contrast of at least 4.5 (WCAG 2, level AA)."""
    for fill, ink in itertools.chain.from_iterable(COLOURS.values()):
        low, high = sorted((luminance(fill), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) > 4.5
