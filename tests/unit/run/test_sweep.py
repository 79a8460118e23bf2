"""Sweeps without processes: which words tell jobs apart, where a sweep lives, what counts as
done.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroexp.config import Config
from zeroexp.errors import ConfigError
from zeroexp.run.sweep import finished, plan_jobs, sweep_directory


def test_jobs_carry_what_sets_them_apart() -> None:
    jobs = plan_jobs(["-m", "zero=stage0,stage3", "data=synthetic", "trainer.devices=1,5"])
    assert [job.differences for job in jobs] == [
        {"zero": "stage0", "trainer.devices": "1"},
        {"zero": "stage0", "trainer.devices": "5"},
        {"zero": "stage3", "trainer.devices": "1"},
        {"zero": "stage3", "trainer.devices": "5"},
    ]
    assert [job.composed is not None for job in jobs] == [True, False, True, False]
    assert jobs[1].problem is not None and "data.batch_size" in str(jobs[1].problem)
    assert jobs[3].label == "zero=stage3,trainer.devices=5"


def test_a_sweep_of_nothing_but_faults_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"zero\.stage"):
        plan_jobs(["-m", "zero=stage0,stage1", "zero.stgae=1"])


def test_a_sweep_has_a_directory_of_its_own_or_the_one_given(tmp_path: Path) -> None:
    config = Config.from_mapping({"paths.runs": str(tmp_path), "name": "x"})
    first = sweep_directory(config, None, None)
    second = sweep_directory(config, None, None)
    assert first != second and first.parent == tmp_path / "x" and first.is_dir()
    assert sweep_directory(config, "zero_stages", None).name.endswith("-zero_stages")
    given = tmp_path / "mine"
    assert sweep_directory(config, None, given) == given and given.is_dir()
    assert sweep_directory(config, None, given) == given


def test_only_runs_that_ended_well_are_done(tmp_path: Path) -> None:
    for name, status in (("a", "ok"), ("b", "crash"), ("c", "ok")):
        (tmp_path / name).mkdir()
        result = {"status": status, "config_digest": f"digest-{name}"}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    (tmp_path / "d").mkdir()
    (tmp_path / "results.csv").touch()
    assert {digest: run.path.name for digest, run in finished(tmp_path).items()} == {
        "digest-a": "a",
        "digest-c": "c",
    }
