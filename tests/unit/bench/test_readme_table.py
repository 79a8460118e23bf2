"""README's table from results made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme


def mode(seconds: list[float], loss: float = 2.0) -> dict[str, Any]:
    """A mode that ran one round of one step per entry of ``seconds``, on one rank."""
    memory = {"state": 8000, "rss_baseline": 100_000}
    return {
        "status": "ok",
        "launches": [
            {"first_step_seconds": 1.0, "peak_rss": [120_500], "peak_rss_steady": [110_000]}
        ],
        "rounds": [[[s]] for s in seconds],
        "losses": [loss],
        "memory": [memory],
    }


def result(**modes: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "Some CPU", "cpu_family_model": "1/2", "cores": 2, "isa": ["avx2"]}
    return {
        "kind": "training",
        "command": "python -m benchmarks train toy",
        "commit": "0123456789abcdef",
        "dirty": True,
        "date": "2026-01-02",
        "machine": machine | {"memory_bytes": 2**30, "kernel": "6.1"},
        "load_before": 0.1,
        "settings": {"world_size": 1, "threads": 1},
        "work": {"name": "toy", "title": "a toy", "num_params": 1000, "modes": modes},
    }


def row_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {label} |"))


def test_a_row_has_ratios_by_round_and_bytes_per_parameter() -> None:
    text = readme.section(
        [result(ddp=mode([1.0, 2.0, 4.0]), fsdp=mode([2.0, 2.0, 2.0]), zx3=mode([1.0, 2.2, 3.6]))]
    )
    # to DDP 1, 1.1, 0.9; to FSDP 0.5, 1.1, 1.8; 8000 B of state and 20 500 B of peak per 1000
    assert row_of(text, "zeroexp stage 3") == (
        "| zeroexp stage 3 | 2.200 | 1.00 (0.90..1.10) | 1.10 (0.50..1.80) of torch FSDP2 "
        "| 8.0 | 20.5 |"
    )
    assert (
        "`python -m benchmarks train toy` at commit 0123456789ab with uncommitted changes" in text
    )
    assert "Some CPU" in text and "docs/benchmarks.md" in text


def test_a_mode_that_did_not_run_is_missing_and_other_work_is_no_ratio() -> None:
    text = readme.section([result(ddp=mode([1.0]), zx1=mode([0.5], loss=2.2))])
    assert "missing: not in this run" in row_of(text, "DeepSpeed stage 1")
    assert "losses differ by 1e-01" in row_of(text, "zeroexp stage 1")
    assert "0.50" not in row_of(text, "zeroexp stage 1").replace("0.500", "")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}


def test_without_results_nothing_is_claimed() -> None:
    assert readme.section([]) == readme.NOTHING_YET
    assert readme.section([{"kind": "kernel"}]) == readme.NOTHING_YET


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    for _ in range(2):
        readme.write([result(ddp=mode([1.0]))], page)
    text = page.read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n\n**a toy**")
    assert text.endswith(f"{readme.END}\nafter\n")
    assert "old" not in text


@pytest.mark.parametrize(
    "text",
    ["", readme.BEGIN, f"{readme.END}{readme.BEGIN}", f"{readme.BEGIN}{readme.BEGIN}{readme.END}"],
)
def test_a_page_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="needs one line"):
        readme.write([], page)
    assert page.read_text() == text
