"""Where a run goes on from: whole checkpoints only, the newest of the right run."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.config import Config
from zeroexp.errors import ConfigError
from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.resume import checkpoint_name, checkpoints_in, digest_without_resume, find


def config(runs: Path, **keys: object) -> Config:
    return Config.from_mapping({"paths.runs": str(runs), "name": "exp", **keys}).resolved()


def make_run(runs: Path, name: str, of: Config, steps: list[int]) -> Path:
    directory = RunDirectory(runs / "exp" / name)
    directory.checkpoints.mkdir(parents=True)
    write_json(directory.run, {"resume_digest": digest_without_resume(of)})
    for step in steps:
        (directory.checkpoints / checkpoint_name(step)).touch()
    return directory.path


def test_a_checkpoint_that_was_being_written_is_none(tmp_path: Path) -> None:
    for name in ("step-00000002.ckpt", "step-00000010.ckpt", ".step-00000012.ckpt.part", "x.ckpt"):
        (tmp_path / name).touch()
    assert [p.name for p in checkpoints_in(tmp_path)] == [
        "step-00000002.ckpt",
        "step-00000010.ckpt",
    ]
    assert checkpoints_in(tmp_path / "missing") == []


def test_a_run_directory_means_its_newest_checkpoint(tmp_path: Path) -> None:
    plain = config(tmp_path)
    run = make_run(tmp_path, "a", plain, [4, 100, 20])
    wanted = run / "checkpoints" / "step-00000100.ckpt"
    for given in (run, run / "checkpoints", wanted):
        assert find(config(tmp_path, **{"checkpoint.resume": str(given)})) == wanted
    assert find(plain) is None


def test_a_run_directory_without_a_checkpoint_is_a_message(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", config(tmp_path), [])
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        find(config(tmp_path, **{"checkpoint.resume": str(run)}))


def test_auto_takes_the_newest_run_that_computes_the_same(tmp_path: Path) -> None:
    auto = config(tmp_path, **{"checkpoint.resume": "auto"})
    assert find(auto) is None  # nothing there yet: a fresh start
    same, other = config(tmp_path), config(tmp_path, **{"optim.lr": 0.5})
    make_run(tmp_path, "20260101-000000", same, [4])
    wanted = make_run(tmp_path, "20260102-000000", auto, [6])  # itself a resumed one
    make_run(tmp_path, "20260103-000000", other, [8])
    make_run(tmp_path, "20260104-000000", same, [])
    assert find(auto) == wanted / "checkpoints" / "step-00000006.ckpt"
