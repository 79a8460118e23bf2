"""The bare io_uring loop of uring_loop.cpp, compiled where it is used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.contender import Unavailable, last_line

MIB = 1 << 20


def build(folder: Path) -> Path:
    """The program, made in ``folder``. Raises Unavailable where there is no compiler."""
    binary = folder / "uring_loop"
    source = Path(__file__).with_name("uring_loop.cpp")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", str(source), "-o", str(binary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"no C++ compiler: {error.filename}") from error
    if done.returncode:
        raise Unavailable(last_line(done.stderr))
    return binary
