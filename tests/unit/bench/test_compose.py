"""The benchmark of answers that need no rank, and its targets."""

from __future__ import annotations

import pytest

from benchmarks import compose, targets
from benchmarks.timings import Timings


def result(plan: object) -> Timings:
    samples = {"plan": plan, "explain": [0.5, 0.6, 0.7], "a wrong key": [1.2, 1.1, 0.2]}
    case = {"name": "command to answer", "what": "", "unit": "s", "samples": samples}
    return Timings({"cases": [case]})


def test_the_median_is_held_against_one_second() -> None:
    verdicts = targets.compose(result([1.0, 3.0, 0.1]))
    assert [verdict.status for verdict in verdicts] == ["met", "met", "not met"]
    assert [verdict.measured for verdict in verdicts] == ["1.00 s", "0.60 s", "1.10 s"]


def test_what_did_not_run_is_missing() -> None:
    assert targets.compose(result("plan imports torch"))[0].status == "missing"
    assert {verdict.status for verdict in targets.compose(None)} == {"missing"}


def test_every_command_is_answered_in_a_fresh_process_without_torch() -> None:
    for name in compose.COMMANDS:
        assert compose._answer(name) > 0


def test_a_command_that_imports_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compose._PROGRAM.replace(
        "import sys\n", "import sys; sys.modules['torch'] = sys\n", 1
    )
    monkeypatch.setattr(compose, "_PROGRAM", program)
    with pytest.raises(compose.AnswerFailed, match="imports torch"):
        compose._answer("a wrong key")


def test_a_wrong_exit_code_is_a_failure_with_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compose.EXIT_CODES, "a wrong key", 0)
    with pytest.raises(compose.AnswerFailed, match=r"zero\.stage"):
        compose._answer("a wrong key")
