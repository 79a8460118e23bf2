"""What /proc says, against what the test itself did."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from zeroexp.run import procfs


def test_peak_remembers_what_was_freed() -> None:
    code = """
from zeroexp.run.procfs import peak_rss_bytes, rss_bytes
before = peak_rss_bytes()
block = bytearray(300 << 20)
for i in range(0, len(block), 4096):
    block[i] = 1
del block
print(peak_rss_bytes() - before, rss_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    peak, now = map(int, done.stdout.split())
    assert 290 << 20 < peak < 330 << 20
    assert now < 50 << 20


def test_everything_a_run_started_is_found_and_killed() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    environ = {**os.environ, procfs.RUN_MARK: "run-a"}
    mine = subprocess.Popen(sleeper, env=environ, start_new_session=True)
    other = subprocess.Popen(sleeper, env={**environ, procfs.RUN_MARK: "run-ab"})
    try:
        deadline = time.monotonic() + 20
        while procfs.marked("run-a") != [mine.pid] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert procfs.kill_marked("run-a") == [mine.pid]
        assert mine.wait(20) == -9
        assert other.poll() is None
        assert procfs.marked("run-a") == []
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_start_ticks_tell_a_process_from_a_zombie_and_from_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert procfs.start_ticks(process.pid) is not None
    assert process.pid in procfs.own_children() and process.pid in procfs.children(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.start_ticks(process.pid) is None  # a zombie
    process.wait()
    assert procfs.start_ticks(process.pid) is None
    assert process.stdin is not None
    process.stdin.close()
