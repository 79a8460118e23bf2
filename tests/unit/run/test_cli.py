"""The command line without runs: flags, commands, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroexp import __version__
from zeroexp.cli import COMMANDS, UsageError, main, read_flags


def test_flags_are_taken_out_and_the_rest_is_left_in_order() -> None:
    flags = read_flags(["a=1", "-q", "-m", "--sweep-dir", "x", "b=2", "--fail-fast", "--odd"])
    assert flags.quiet and flags.fail_fast and flags.sweep_dir == Path("x") and not flags.help
    assert flags.rest == ["a=1", "-m", "b=2", "--odd"]
    assert read_flags(["--sweep-dir=y/z"]).sweep_dir == Path("y/z")
    with pytest.raises(UsageError, match="no directory"):
        read_flags(["--sweep-dir"])


F1B1 = ["pipeline=1f1b", "trainer.devices=2", "trainer.accelerator=cpu", "precision=fp32"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "x"], "arrives with sharded checkpoints"),
        (["--fail-fast", "zero=stage0"], "add -m"),
        (["report", "nowhere"], "there is no nowhere"),
        (["explain", "zero.stgae"], "zero.stage"),
        (["zero.stgae=1"], "zero.stage"),
        (["zero.stage=é"], "it has a character that Hydra's grammar does not know"),
        (["sweep=no_such"], "no_such"),
        (["plan", "trainer.devices=7"], "data.batch_size"),
        (["plan", "pipeline=1f1b"], "2 does not divide 1 rank."),
        (["plan", "--timeline=out.png"], "wanted FILE.svg"),
        (["plan", "--timeline"], "nothing to draw"),
        (["plan", *F1B1, "--timeline=no/such/out.svg"], "No such file or directory"),
        (["--timeline", "zero=stage0"], "--timeline is for zeroexp plan"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("zeroexp: ") and said in err


def test_sweeps_inside_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert main(["-m", "zero=stage0,stage1"]) == 2
    assert "cannot run inside rank 0" in capsys.readouterr().err


def test_plan_prints_bytes_and_says_with_its_exit_code_whether_it_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["zero=stage3", "trainer.devices=2", "trainer.accelerator=cpu", "precision=fp32"]
    assert main(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert "820,352 parameters" in page and "all-gather" in page
    huge = ["model.dim=65536", "model.layers=100", "model.heads=64", "trainer.accelerator=cpu"]
    assert main(["plan", *huge]) == 1
    assert "TiB" in capsys.readouterr().out


def test_plan_of_a_pipeline_shows_its_stages_and_draws_its_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *F1B1, "--timeline", "pipeline.micro_batches=4"]) == 0
    page = capsys.readouterr().out
    assert "pipeline 1f1b: 2 ranks, 1 pipe; 4 micro-batches of 6, cut by parameters" in page
    assert "embedding to blocks.1" in page and "micro-batches alive" in page
    assert "rank 0 |F0" in page and "rank 1 |" in page
    assert main(["plan", *F1B1, "--timeline", "out.svg"]) == 0
    assert "timeline: out.svg" in capsys.readouterr().out
    assert Path("out.svg").read_text().startswith("<svg ")
    assert main(["plan", "zero=stage3", "trainer.devices=4", "pipeline=interleaved"]) == 0
    page = capsys.readouterr().out
    assert "zero=stage3 gathers a stage of the pipe up to " in page
    assert main(["plan", "pipeline=auto", "trainer.devices=2"]) == 0
    assert "not 1f1b: " in capsys.readouterr().out


def test_explain_says_what_a_key_is_and_where_its_value_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "zero.stage", "zero=stage2"]) == 0
    assert "conf/zero/stage2.yaml" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert "optim" in capsys.readouterr().out


def test_help_names_every_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for command in set(COMMANDS) - {"train", "sweep", "convert"}:
        assert f"zeroexp {command}" in page
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeroexp {__version__}\n"


def test_doctor_names_what_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    for line in ("python", "torch", "torch threads", "ops", "precision=auto", "memory", "/dev/shm"):
        assert any(row.startswith(line) for row in page.splitlines()), line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_run_is_prepared_is_its_end(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroexp.run import driver

    planned = driver.forecast

    def interrupted(config: Any) -> Any:
        os.kill(os.getpid(), number)
        return planned(config)

    monkeypatch.setattr(driver, "forecast", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(["data=synthetic", "-q"]) == code
    (run,) = tmp_path.glob("runs/*/*")
    assert json.loads((run / "status.json").read_text())["status"] == "interrupted"
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
    assert not (run / "launch" / "agent.log").exists()  # nothing was started
    assert not (run / "launch" / "reserve").exists()


def test_ctrl_c_while_train_py_is_importing_has_no_traceback(tmp_path: Path) -> None:
    package = tmp_path / "zeroexp"
    package.mkdir()
    (package / "__init__.py").write_text("raise KeyboardInterrupt\n")
    shutil.copy(Path(__file__).parents[3] / "train.py", tmp_path)
    # Without site-packages, where an editable install would lead to the real package.
    command = [sys.executable, "-S", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "zeroexp: interrupted\n")


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_sweep_directory_that_cannot_be_made_is_named(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["-m", "zero=stage0,stage1", "data=synthetic", "--sweep-dir", where]) == 2
    said = capsys.readouterr().err
    assert f"--sweep-dir  cannot write to {where}:" in said and "paths.runs" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("where", "reason"), [("file", "Not a directory"), ("/proc/x", "No such file or directory")]
)
def test_swap_files_that_cannot_be_written_are_found_before_anything_is_made(
    where: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NV-02: key, path and the system's reason, before a model is built."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["offload=nvme", "data=synthetic", f"offload.nvme.dir={where}"]) == 2
    said = capsys.readouterr().err
    path = where if where.startswith("/") else f"{tmp_path}/{where}"
    assert f"offload.nvme.dir  cannot write to {path}: {reason}." in said
    assert "Point offload.nvme.dir at a directory you can write." in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_dead_run_left_is_removed_before_a_disk_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroexp.config import compose
    from zeroexp.run import driver
    from zeroexp.run import forecast as forecasting

    monkeypatch.chdir(tmp_path)
    rest = tmp_path / "runs" / "swap" / "zeroexp-swap-0123456789abcdef-rank0"
    rest.mkdir(parents=True)
    (rest / ".zeroexp-swap-lock").touch()
    (rest / "optim").write_bytes(bytes(4096))
    monkeypatch.setattr(forecasting, "free_bytes", lambda path: 0 if rest.exists() else 1 << 30)
    start = driver.prepare(compose(["offload=nvme", "data=synthetic"], environ={}), [])
    assert start.forecast is not None and start.forecast.fits_disk is True
    assert list((tmp_path / "runs" / "swap").iterdir()) == []


def test_the_default_folder_of_swap_files_is_the_runs_directorys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["offload=nvme", "data=synthetic", "paths.runs=file"]) == 2
    said = capsys.readouterr().err
    assert "paths.runs" in said and "offload.nvme.dir" not in said


def test_the_command_alone_says_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``zeroexp`` starts no run that nobody asked for; ``python train.py`` is a run."""
    monkeypatch.setattr(sys, "argv", ["zeroexp"])
    assert main() == 2
    said = capsys.readouterr()
    assert "zeroexp plan" in said.err and not said.out
