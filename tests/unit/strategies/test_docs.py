"""The code in docs/lightning.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "lightning.md"
LIMIT = 200.0


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def run(code: str, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(code)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_RANK", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_example_trains_on_two_processes(tmp_path: Path) -> None:
    first = blocks()[0]
    assert "devices=2" in first
    run(first, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_other_examples_run_one_after_the_other(tmp_path: Path) -> None:
    rest = blocks()[1:]
    assert len(rest) == 5
    run("\n".join(rest), tmp_path)


def test_every_option_named_in_the_page_exists() -> None:
    """`ZeroStrategy(…)` in prose and code takes only arguments the class has."""
    import inspect

    from zeroexp.strategies import strategy_class

    known = set(inspect.signature(strategy_class("lightning.pytorch").__init__).parameters)
    used: set[str] = set()
    for call in re.findall(r"ZeroStrategy\(([^)]*)\)", PAGE.read_text()):
        used |= set(re.findall(r"(\w+)=", re.sub(r"\{.*\}", "", call)))
    assert used
    assert used <= known
