"""The follower of rank 0's log: whole lines, one living progress line, no traceback before its
turn.
"""

from __future__ import annotations

import io
from pathlib import Path

from zeroexp.run.terminal import FAILED_LINE, STARTED_LINE, Follower


def test_lines_are_copied_whole_and_once(tmp_path: Path) -> None:
    path, out = tmp_path / "rank0.log", io.StringIO()
    follower = Follower(path, out, live=False)
    follower.poll()  # the file is not there yet
    path.write_text("first\nsec")
    follower.poll()
    assert out.getvalue() == "first\n"
    with open(path, "a") as file:
        file.write("ond\nlast without end")
    follower.poll()
    assert out.getvalue() == "first\nsecond\n"
    follower.finish()
    assert out.getvalue() == "first\nsecond\nlast without end\n"


def test_on_a_terminal_progress_replaces_progress(tmp_path: Path) -> None:
    path, out = tmp_path / "rank0.log", io.StringIO()
    path.write_text("hello\nstep 1/9 | loss 1\nstep 2/9 | loss 1\na warning\nstep 3/9 | loss 1\n")
    follower = Follower(path, out, live=True)
    follower.poll()
    follower.finish()
    clear = "\r\x1b[K"
    assert out.getvalue() == (
        f"hello\nstep 1/9 | loss 1{clear}step 2/9 | loss 1{clear}a warning\nstep 3/9 | loss 1\n"
    )


def test_a_traceback_stays_in_the_log_until_the_ranks_start_again(tmp_path: Path) -> None:
    path, out = tmp_path / "rank0.log", io.StringIO()
    path.write_text(f"one\n{FAILED_LINE}0\nTraceback\n{STARTED_LINE}2\ntwo\n")
    follower = Follower(path, out, live=False)
    follower.finish()
    assert out.getvalue() == "one\ntwo\n"


def test_quiet_copies_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "rank0.log", io.StringIO()
    path.write_text("hello\n")
    follower = Follower(path, out, live=False, show=False)
    follower.finish()
    assert out.getvalue() == ""
