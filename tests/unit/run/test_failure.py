"""Which rank failed first: error files, exit codes and the kernel's count of kills for memory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from zeroexp.errors import CollectiveTimeout, ConfigError, NonFiniteError, Problem
from zeroexp.run import fault, status
from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.failure import headline, verdict

CLOSED = "[pair.cc:537] Read error [127.0.0.1]:26012: Connection reset by peer. Check the logs"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.launch.mkdir()
    return made


def exits(directory: RunDirectory, *ends: tuple[int, int | None, float]) -> None:
    """Write launch/exits.json: (rank, exit code, time) each."""
    entries: list[dict[str, Any]] = [
        {"rank": rank, "pid": 100 + rank, "exit_code": code, "time": time}
        for rank, code, time in ends
    ]
    write_json(directory.exits, {"exits": entries})


def test_the_rank_that_raised_leads_not_the_one_that_lost_it(directory: RunDirectory) -> None:
    # Rank 0's error is noted first, since rank 1 wrote its file late; its words give it away.
    fault.record(directory, 0, RuntimeError(CLOSED), at=10.0)
    fault.record(directory, 1, ValueError("boom"), at=10.2)
    exits(directory, (0, 1, 10.3), (1, 1, 10.3))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("crash", 1)
    assert found.reason == "rank 1: ValueError: boom"
    assert found.first is not None and "ValueError: boom" in found.first.brief


def test_of_two_own_errors_the_earlier_leads(directory: RunDirectory) -> None:
    fault.record(directory, 0, ValueError("later"), at=11.0)
    fault.record(directory, 3, ValueError("earlier"), at=10.0)
    assert verdict(directory, agent_code=1, oom_kills=0).failed_rank == 3


def test_ranks_that_agreed_on_an_error_speak_through_the_first(directory: RunDirectory) -> None:
    fault.record(directory, 0, NonFiniteError("step 2"), at=10.01)
    fault.record(directory, 1, NonFiniteError("step 2"), at=10.0)
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("nan", 0)


def test_a_brief_traceback_folds_libraries_and_keeps_the_users_frames() -> None:
    import json

    try:
        json.loads("{", object_hook=len)
    except ValueError as error:
        text = fault.brief_traceback(error)
    lines = text.splitlines()
    assert lines[0].startswith("Traceback")
    assert "test_failure.py" in lines[1] and "json.loads" in lines[2]
    assert lines[3].strip() == "... 2 frames in Python"  # loads, decode; raw_decode raised it
    assert "raw_decode" in lines[4] and lines[-1].startswith("json.decoder.JSONDecodeError")
    assert fault.brief_traceback(NonFiniteError("x")) == ""


def test_a_killed_rank_is_named_though_it_could_say_nothing(directory: RunDirectory) -> None:
    fault.record(directory, 0, RuntimeError(CLOSED), at=10.0)
    exits(directory, (1, -signal.SIGKILL, 10.02), (0, 1, 10.1), (2, -signal.SIGTERM, 10.2))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("crash", 1)
    assert "SIGKILL" in found.reason


def test_the_engine_s_word_for_a_lost_peer_is_a_consequence(directory: RunDirectory) -> None:
    broke = "all-gather of unit root: the connection to rank 1 broke (Connection closed by peer)"
    fault.record(directory, 0, CollectiveTimeout(broke), at=10.0)
    exits(directory, (1, -signal.SIGSEGV, 10.02), (0, 1, 10.1))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("crash", 1)
    assert "SIGSEGV" in found.reason


def test_a_kill_for_memory_is_oom(directory: RunDirectory) -> None:
    exits(directory, (1, -signal.SIGKILL, 10.0))
    found = verdict(directory, agent_code=1, oom_kills=1)
    assert (found.status, found.failed_rank) == ("oom", 1)


def test_memory_kills_elsewhere_do_not_colour_an_own_error(directory: RunDirectory) -> None:
    fault.record(directory, 0, ValueError("boom"), at=10.0)
    assert verdict(directory, agent_code=1, oom_kills=3).status == "crash"


def test_sigterm_to_one_rank_names_it(directory: RunDirectory) -> None:
    fault.record(directory, 0, RuntimeError(CLOSED), at=10.1)
    exits(directory, (1, -signal.SIGTERM, 10.0), (0, 1, 10.2))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("crash", 1)
    assert "SIGTERM" in found.reason


def test_exit_code_without_words(directory: RunDirectory) -> None:
    exits(directory, (2, 3, 10.0), (0, -signal.SIGTERM, 10.1))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert found.failed_rank == 2
    assert "exit code 3" in found.reason


def test_one_rank_waiting_for_another_names_the_one_that_did_not_come(
    directory: RunDirectory,
) -> None:
    late = RuntimeError("Timed out waiting 3000ms for recv operation to complete")
    fault.record(directory, 0, late, at=10.0)
    exits(directory, (0, 1, 10.1), (1, 128 + signal.SIGTERM, 10.2))
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("timeout", 1)
    assert "rank 1 did not" in found.reason and "Timed out" in found.reason


def test_an_agent_without_ranks_speaks_for_itself(directory: RunDirectory) -> None:
    directory.agent_log.write_text("Traceback\nImportError: no torch\n")
    found = verdict(directory, agent_code=1, oom_kills=0)
    assert (found.status, found.failed_rank) == ("crash", None)
    assert "ImportError: no torch" in found.reason
    directory.agent_log.write_text("RuntimeError: EADDRINUSE, errno 98\n")
    assert "in use" in verdict(directory, agent_code=1, oom_kills=0).reason


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("boom", "boom"),
        ("boom\nmore", "boom"),
        ("should be one of:\n * a\n * b", "should be one of: * a"),
        ("a:\nb:\nc\nd", "a: b: c"),
        ("nothing follows:", "nothing follows"),
        ("", ""),
    ],
)
def test_a_reason_ends_in_a_sentence(message: str, expected: str) -> None:
    assert headline(message) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError([Problem("a", "b")]), status.CONFIG),
        (NonFiniteError("loss is nan"), status.NAN),
        (CollectiveTimeout("all_gather"), status.TIMEOUT),
        (CollectiveTimeout("all-gather: the connection to rank 1 broke (reset)"), status.CRASH),
        (MemoryError(), status.OOM),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), status.OOM),
        (OSError(12, "Cannot allocate memory"), status.OOM),
        (RuntimeError("Timed out waiting 100ms for send operation to complete"), status.TIMEOUT),
        (RuntimeError(CLOSED), status.CRASH),
        (ValueError("the word timeout in a user's error"), status.CRASH),
        (KeyError("x"), status.CRASH),
    ],
)
def test_classes_of_errors(error: Exception, expected: str) -> None:
    assert fault.classify(error) == expected


def test_the_cause_of_an_error_counts() -> None:
    try:
        try:
            raise NonFiniteError("gradient")
        except NonFiniteError as inner:
            raise RuntimeError("training stopped") from inner
    except RuntimeError as outer:
        assert fault.classify(outer) == status.NAN
