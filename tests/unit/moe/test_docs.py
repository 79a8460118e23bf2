"""The code in docs/moe.md runs, and the page names what there is."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

from zeroexp.moe import GATES, MoE
from zeroexp.moe.capacity import PRIORITIES

PAGE = (Path(__file__).parents[3] / "docs" / "moe.md").read_text()


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    script = tmp_path / "script.py"
    script.write_text(block)
    runpy.run_path(str(script))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0.moe", "1.moe"]
    assert all("dropped 0%" in line for line in lines)


def test_the_page_names_the_gates_and_the_arguments() -> None:
    table = PAGE.split("|-|-|-|\n")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*)\|$", table, re.M)
    assert {name for name, _ in rows} == set(GATES)
    for name, options in rows:
        found = set(re.findall(r"`(\w+)[=`]", options)) - {"gumbel", "skip"}
        assert found <= set(GATES[name].options) and set(GATES[name].options) <= found | {"gumbel"}
    known = set(inspect.signature(MoE.__init__).parameters)
    named = {"capacity_factor", "eval_capacity_factor", "min_capacity", "priority", "shared"}
    named |= {"residual", "balance_loss", "z_loss", "sequence_loss", "bias_rate", "group", "gate"}
    assert named <= known and all(re.search(rf"\b{name}\b", PAGE) for name in named)
    assert all(f"`{priority}`" in PAGE or f'"{priority}"' in PAGE for priority in PRIORITIES)
