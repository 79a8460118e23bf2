"""A rank ends soon after it was told to, whatever it does; a child's end is no end of its
parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START = """
import os, signal, sys, time
from pathlib import Path
from zeroexp.run.lifeline import end_on_sigterm
end_on_sigterm(0.5, Path(sys.argv[1]))
"""


def start(code: str, stack: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", START + code, str(stack)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_finally_blocks_run_and_the_place_is_noted(tmp_path: Path) -> None:
    process = start(
        "def somewhere():\n    try:\n        print('ready', flush=True)\n        time.sleep(600)\n"
        "    finally:\n        print('cleaned')\nsomewhere()",
        tmp_path / "stack.txt",
    )
    process.send_signal(signal.SIGTERM)
    assert end(process) == (143, "cleaned\n")
    assert "in somewhere" in (tmp_path / "stack.txt").read_text()


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    # the handler's SystemExit is swallowed again and again, as by a loop that retries
    code = (
        "print('ready', flush=True)\n"
        "while True:\n    try:\n        time.sleep(600)\n    except SystemExit: pass"
    )
    process = start(code, tmp_path / "stack.txt")
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_main_thread_in_c_code_is_ended(tmp_path: Path) -> None:
    # a lock that never comes, waited for without running signal handlers: as inside a collective
    code = (
        "import ctypes\nprint('ready', flush=True)\n"
        "libc = ctypes.CDLL(None)\nwhile True: libc.sleep(600)"
    )
    process = start("signal.siginterrupt(signal.SIGTERM, False)\n" + code, tmp_path / "stack.txt")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_a_forked_child_that_is_told_to_end_leaves_its_parent_alone(tmp_path: Path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    time.sleep(600)
time.sleep(0.3)
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
print('ready', flush=True)
time.sleep(1.5)
print(os.WTERMSIG(status))
"""
    assert end(start(code, tmp_path / "stack.txt")) == (0, "15\n")


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "import os, sys, time; from zeroexp.run.lifeline import die_with_parent;"
        "die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{pid}/stat").exists()
