"""Where a run comes from: commit, uncommitted changes, command line, versions, machine. The content
of run.json.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroexp.run import machine

_PACKAGES = (
    "zeroexp",
    "torch",
    "lightning",
    "pytorch_lightning",
    "hydra-core",
    "omegaconf",
    "numpy",
)
# A diff larger than this says little about a run and would make run.json unreadable.
_LONGEST_DIFF = 1 << 20
_GIT_SECONDS = 10.0


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that a result may depend on; None where it is not
    installed.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _git(where: Path, *arguments: str) -> str | None:
    # Optional locks off: looking at a repository must not disturb a git command that the user runs
    # meanwhile.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def git(where: Path) -> dict[str, Any]:
    """``{sha, diff, untracked}`` of the repository around ``where``; null outside one or without
    git.

    ``diff`` is against the commit and is cut after 1 MiB; ``untracked`` lists files that git
    neither tracks nor ignores.
    """
    sha = _git(where, "rev-parse", "HEAD")
    if sha is None:
        return {"sha": None, "diff": None, "untracked": None}
    diff = _git(where, "diff", "HEAD", "--no-ext-diff") or ""
    if len(diff) > _LONGEST_DIFF:
        diff = diff[:_LONGEST_DIFF] + "\n[cut after 1 MiB]\n"
    untracked = _git(where, "ls-files", "--others", "--exclude-standard") or ""
    return {"sha": sha.strip(), "diff": diff, "untracked": untracked.splitlines()[:200]}


def describe(argv: Sequence[str], *, threads_per_rank: int) -> dict[str, Any]:
    """The content of run.json. ``argv`` is the command line after the program's name."""
    return {
        "argv": list(argv),
        "directory": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "threads_per_rank": threads_per_rank,
        "git": git(Path.cwd()),
        "versions": versions(),
        "hardware": machine.describe(),
    }
