"""The commands in docs/pipeline.md run, and the page names the schedules there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zeroexp.cli import main
from zeroexp.config.sections.pipeline import SCHEDULES
from zeroexp.pipeline.costs import Costs
from zeroexp.pipeline.schedules import RECIPES
from zeroexp.pipeline.simulate import simulate

PAGE = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()
PLANNING = PAGE.partition("## Planning one")[2]
(PLANS,) = re.findall(r"^```bash\n(.*?)^```$", PLANNING, re.M | re.S)
(REFUSED,) = re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("line", PLANS.splitlines())
def test_the_plans_are_made(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = line.split()
    assert program == "zeroexp" and main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^pipeline \w+: 2 ranks", out, re.M)
    assert ("rank 0 |" in out) == line.endswith("--timeline")
    assert Path("out.svg").exists() == line.endswith("out.svg")


def test_the_refusal_is_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, said = REFUSED.partition("\n")
    assert main(command.split()[2:]) == 2
    assert capsys.readouterr().err == said


def test_the_table_is_of_the_schedules_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.M)
    assert {name for name, _ in rows} == set(SCHEDULES)
    for name, virtual in rows:
        if name != "auto":
            wanted = re.search(r"\d", virtual)
            assert wanted is not None and int(wanted[0]) == RECIPES[name].default


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16)])
def test_the_table_says_how_long_ranks_idle(p: int, m: int) -> None:
    idle = {}
    for name, recipe in RECIPES.items():
        made = recipe.make(p, m)
        found = simulate(made, Costs.uniform(made.num_stages, activations=1))
        idle[name] = found.bubble_fraction
        alive = found.peak_activations
        if name in ("gpipe", "breadth_first"):
            assert max(alive) == m
        if name in ("1f1b", "zb_h1"):
            assert max(alive) <= p
        if name == "zb_v":
            assert max(alive) <= p
        if name == "dualpipe_v":
            assert max(alive) <= p + 0.5
    assert idle["gpipe"] == idle["1f1b"] == pytest.approx((p - 1) / (m + p - 1))
    assert idle["interleaved"] == pytest.approx((p - 1) / (2 * m + p - 1))
    assert idle["breadth_first"] == pytest.approx(idle["interleaved"])
    # A third of the time that 1F1B idles, in a step that is that much shorter.
    third = (p - 1) / 3
    assert idle["zb_h1"] == pytest.approx(third / (m + third))
    assert idle["zb_v"] < idle["zb_h1"] and idle["zb_v"] <= idle["dualpipe_v"]
