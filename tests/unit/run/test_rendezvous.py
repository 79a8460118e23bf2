"""MASTER_ADDR and MASTER_PORT before torch sees them, and the deadline of the rendezvous."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from zeroexp.cli import main
from zeroexp.errors import ConfigError
from zeroexp.run.rendezvous import check_address, deadline

WHOLE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_sets_is_accepted() -> None:
    check_address(WHOLE)
    check_address({"MASTER_PORT": "abc"})  # no ranks: somebody else's variables
    check_address({**WHOLE, "MASTER_ADDR": "localhost", "MASTER_PORT": "65535"})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MASTER_PORT", "abc", "abc is no port"),
        ("MASTER_PORT", "65536", "65536 is no port"),
        ("MASTER_PORT", "0", "0 is no port"),
        ("MASTER_PORT", None, "is not set"),
        ("MASTER_ADDR", "no.such.host.invalid", "no host no.such.host.invalid is known"),
        ("MASTER_ADDR", "", "is not set"),
        ("RANK", "x", "x is not the number of a rank"),
        ("LOCAL_RANK", None, "is not set"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(name: str, value: str | None, said: str) -> None:
    environ = {key: text for key, text in {**WHOLE, name: value}.items() if text is not None}
    with pytest.raises(ConfigError) as caught:
        check_address(environ)
    (problem,) = caught.value.problems
    assert problem.key == name and said in problem.problem and problem.fix.startswith("Set it to")


def test_the_command_says_it_once_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**WHOLE, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "abc"}.items():
        monkeypatch.setenv(name, value)
    assert main(["launch=external", "data=synthetic"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("zeroexp: 1 problem") and "abc is no port" in err


def test_a_body_that_waits_for_ever_ends_with_one_message() -> None:
    code = (
        "import time, zeroexp.run.rendezvous as r; r._LATER_SECONDS = 0.0\n"
        "with r.deadline(1, 2, 0.2): time.sleep(600)\n"
    )
    environ = {**WHOLE, "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("zeroexp: rank 1 of 2 did not meet the others at 127.0.0.1:29500")


def test_a_body_in_time_goes_on() -> None:
    with deadline(0, 2, -1.9):  # 0.1 s from now
        pass
    time.sleep(0.3)  # it would have ended this very process
