"""The page of benchmarks from results made by hand, whose ratios can be worked out on paper."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table, targets
from benchmarks.modes import MODES
from benchmarks.summary import WorkResult
from benchmarks.timings import Timings

PARAMS = 1000


def mode(rounds: list[list[list[float]]], **changes: Any) -> dict[str, Any]:
    """A mode that ran; ``rounds[round][rank][step]`` in seconds."""
    memory = {"params": 2000, "grads": 2000, "optim": 4000, "state": 8000, "tensors": 9000}
    memory |= {"padding": 0, "rss_baseline": 100_000}
    return {
        "status": "ok",
        "reason": None,
        "launches": [
            {
                "first_step_seconds": 4.0,
                "peak_rss": [120_000, 119_000],
                "peak_rss_steady": [110_000, 115_000],
            }
        ],
        "rounds": rounds,
        "cpu_seconds": [],
        "losses": [2.0, 1.5],
        "memory": [memory, memory],
        "versions": {"torch": "2.13.0"},
        "notes": [],
    } | changes


def result(work: str, modes: dict[str, Any]) -> dict[str, Any]:
    """A training result file."""
    return {
        "kind": "training",
        "command": "python -m benchmarks train " + work,
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02 03:04 UTC",
        "machine": {
            "cpu": "Some CPU",
            "cpu_family_model": "1/2",
            "cores": 2,
            "isa": ["avx2"],
            "memory_bytes": 24 * 2**30,
            "kernel": "6.1",
        },
        "load_before": 0.1,
        "settings": {"world_size": 2, "threads": 1, "rounds": 3, "steps": 1},
        "work": {"name": work, "title": "toy", "num_params": PARAMS, "modes": modes},
    }


# Slower rank of each round: ddp 1, 2, 4 s; zx1 1, 2.2, 3.6 s. Ratios 1, 1.1, 0.9: the median is 1,
# while the ratio of the medians would be 1.1.
DDP = [[[1.0], [0.5]], [[1.5], [2.0]], [[4.0], [4.0]]]
ZX1 = [[[0.9], [1.0]], [[2.2], [2.0]], [[3.0], [3.6]]]


def test_ratio_is_paired_by_round_and_takes_the_slower_rank() -> None:
    work = WorkResult(result("gpt10", {"ddp": mode(DDP), "zx1": mode(ZX1)})["work"])
    ratio = work.ratio("zx1", "ddp")
    assert ratio is not None
    assert ratio.median == pytest.approx(1.0)
    assert [ratio.low, ratio.high] == pytest.approx([0.9, 1.1])
    step = work.step_seconds("ddp")
    assert step is not None
    assert (step.median, step.low, step.high) == (2.0, 1.0, 4.0)


def test_memory_is_per_parameter_and_peak_is_the_larger_rank() -> None:
    work = WorkResult(result("gpt10", {"ddp": mode(DDP)})["work"])
    assert work.bytes_per_param("ddp", "state") == 8.0
    assert work.bytes_per_param("ddp", "tensors") == 9.0
    assert work.peak_bytes_per_param("ddp") == 20.0  # 120 000 while building, less the baseline
    assert work.peak_bytes_per_param("ddp", steady=True) == 15.0


@pytest.mark.parametrize(
    ("peer", "limit", "status"),
    [("ddp", 1.05, "met"), ("ddp", 0.95, "not met"), ("ds1", 0.8, "missing")],
)
def test_step_target_is_met_not_met_or_missing(peer: str, limit: float, status: str) -> None:
    failed: dict[str, Any] = {
        "status": "missing",
        "reason": "rank 0: no wheel",
        "notes": [],
        "versions": None,
    }
    modes = {"ddp": mode(DDP), "zx1": mode(ZX1), "ds1": failed}
    works = {"gpt10": WorkResult(result("gpt10", modes)["work"])}
    verdict = targets.step_time(works, "gpt10", "zx1", peer, limit)
    assert verdict.status == status
    assert verdict.met is (status == "met")


def test_step_target_is_not_met_where_the_losses_show_other_work() -> None:
    other = mode(ZX1, losses=[2.0, 1.501])
    works = {"gpt10": WorkResult(result("gpt10", {"ddp": mode(DDP), "zx1": other})["work"])}
    verdict = targets.step_time(works, "gpt10", "zx1", "ddp", 1.05)
    assert verdict.status == "not met"
    assert "losses differ" in str(verdict.measured)


@pytest.mark.parametrize(
    ("stage", "bytes_per_param"), [(0, 16.0), (1, 12.0), (2, 10.0), (3, 8.0)]
)  # 4 + 4 + 8 bytes, halved at 2 ranks from stage 1 (optimizer), 2 (gradients), 3 (parameters) on
@pytest.mark.parametrize(("extra", "status"), [(0, "met"), (4, "not met")])
def test_state_target_wants_the_formula_to_the_byte(
    stage: int, bytes_per_param: float, extra: int, status: str
) -> None:
    found = mode(ZX1)
    found["memory"] = copy.deepcopy(found["memory"])
    for rank in found["memory"]:
        rank["state"] = int(bytes_per_param * PARAMS) + 64
        rank["padding"] = 64
    found["memory"][0]["state"] += extra
    name = f"zx{stage}"
    works = {"mlp": WorkResult(result("mlp", {name: found})["work"])}
    assert targets.state_bytes(works, "mlp", stage).status == status


def test_page_has_a_row_for_every_mode_and_counts_the_targets_that_are_met() -> None:
    text = table.page([result("gpt10", {"ddp": mode(DDP), "zx1": mode(ZX1)})])
    rows = {
        name: next(
            line for line in text.splitlines() if line.startswith("|") and f"(`{name}`)" in line
        )
        for name in MODES
    }
    assert "1.000 (0.900..1.100)" in rows["zx1"]
    assert "2.0000 (1.0000..4.0000)" in rows["ddp"]
    for name in set(MODES) - {"ddp", "zx1"}:
        assert "missing: not in this run" in rows[name]
    assert {row.count("|") for row in rows.values()} == {table.HEADER[0].count("|")}
    assert "`python -m benchmarks train gpt10` at commit 0123456789ab, 2026-01-02" in text
    lines = [line for line in text.splitlines() if re.search(r"\| (met|not met|missing) \|$", line)]
    met = [line for line in lines if line.endswith("| met |")]
    # Only the ratio of zx1 to DDP can be met here: zx1's state is not the formula's, every other
    # peer is missing.
    assert [line for line in met if "step time of zx1 at most 1.05x of ddp" in line] == met != []
    assert f"{len(met)} of {len(lines)} met" in text


def test_page_of_no_results_has_only_missing_targets() -> None:
    text = table.page([])
    assert "0 of " in text
    assert "| met |" not in text
    assert "| not met |" not in text


def test_timings_are_compared_round_by_round() -> None:
    samples = {"zeroexp": [10.0, 20.0, 40.0], "floor": [9.0, 19.0, 36.0], "slow": "no compiler"}
    case = {"name": "flat, 1 thread", "what": "", "unit": "ms", "samples": samples}
    timings = Timings({"cases": [case]})
    verdict = targets.speed_up(timings, "flat, 1 thread", "zeroexp", "floor", 0.9)
    assert verdict.measured == "0.900 (0.900..0.950)"
    assert verdict.status == "met"
    assert targets.speed_up(timings, "flat, 1 thread", "zeroexp", "slow", 0.9).status == "missing"
    assert any("missing: no compiler" in line for line in timings.rows())


def test_write_reads_every_file_of_the_folder(tmp_path: Path) -> None:
    for work in ("gpt10", "mlp"):
        file = tmp_path / f"training-{work}.json"
        file.write_text(json.dumps(result(work, {"ddp": mode(DDP)})))
    table.write(tmp_path, tmp_path / "docs" / "page.md")
    text = (tmp_path / "docs" / "page.md").read_text()
    assert "## gpt10: toy" in text
    assert "## mlp: toy" in text
