"""Builds the C++ tests with the sanitizers and runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Kept between runs, so that only what changed is compiled again.
BUILD = ROOT / "build" / "native"

needs_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="needs cmake and a C++ compiler",
)


def run(*command: str | Path, timeout: float) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


@needs_compiler
@pytest.mark.timeout(600)
def test_kernels_under_the_sanitizers() -> None:
    run("cmake", "-S", ROOT / "tests" / "native", "-B", BUILD, "-G", "Ninja", timeout=120)
    run("cmake", "--build", BUILD, timeout=400)
    output = run(BUILD / "kernels_test", timeout=200)
    assert output.rstrip().endswith(" 0 failures"), output
    assert int(output.split()[-4]) > 1_000_000, "the checks ran"


@needs_compiler
@pytest.mark.timeout(600)
def test_file_engine_under_the_sanitizers() -> None:
    run("cmake", "-S", ROOT / "tests" / "native", "-B", BUILD, "-G", "Ninja", timeout=120)
    run("cmake", "--build", BUILD, timeout=400)
    output = run(BUILD / "io_test", timeout=200)
    assert output.rstrip().endswith(" 0 failures"), output
    assert int(output.split()[-4]) > 10_000, "the checks ran"
