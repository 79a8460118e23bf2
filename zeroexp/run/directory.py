"""The directory of one run: made exclusively, named by time and tag, and the one place that knows
its paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from zeroexp.errors import ConfigError, Problem
from zeroexp.folder import missing_parents, unwritable

# One path component may take 255 bytes on every common file system; time and suffix need 30 of
# them.
_LONGEST_TAG = 64


def safe_name(text: str) -> str:
    """``text`` as one path component: letters, digits, ``.``, ``_``, ``-`` and at most 64 bytes.

    ``=`` and ``,`` (the separators of overrides) become ``-`` and ``_``. Where anything else had to
    be replaced or cut, eight hex digits of the text's SHA-256 are appended, so that two texts which
    read alike stay apart.
    """
    readable = text.replace("=", "-").replace(",", "_")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", readable).strip(".-_")
    if name == readable and len(name) <= _LONGEST_TAG:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_TAG - 9]}-{digest}".lstrip("-") if text else ""


def make_exclusive(parent: Path, name: str) -> Path:
    """Create ``parent/name``, or ``name-2``, ``name-3`` … if taken; two callers never get the same
    directory.

    Raises :class:`ConfigError` on ``paths.runs`` when the directory cannot be made (read-only, a
    file in the way).
    """
    made = missing_parents(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            _probe(path)
            return path
    except OSError as error:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise unwritable(parent, error) from error
    raise ConfigError(
        [
            Problem(
                "paths.runs", f"{parent} holds 10,000 runs named {name}.", "Use another directory."
            )
        ]
    )


def _probe(path: Path) -> None:
    """Write and remove one file, so that a directory that takes no data is found now and leaves
    nothing behind.
    """
    probe = path / ".probe"
    try:
        probe.write_bytes(b"zeroexp")
        probe.unlink()
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run directory. Nothing else in the package spells these names."""

    path: Path

    @classmethod
    def create(cls, runs: Path, name: str, tag: str, *, now: float | None = None) -> RunDirectory:
        """Make ``runs/<name>/<time>-<tag>`` exclusively (a number is appended while the name is
        taken).
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        label = safe_name(tag)
        parent = Path(os.path.abspath(runs)) / (safe_name(name) or "run")
        return cls(make_exclusive(parent, f"{stamp}-{label}" if label else stamp))

    def discard(self) -> None:
        """Remove the directory with all it holds (a start that failed leaves nothing half-
        written).
        """
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def origins(self) -> Path:
        return self.path / "origins.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def launch(self) -> Path:
        """What driver, agent and ranks leave for each other: launch.json, agent.log, exits.json,
        rankN.json.
        """
        return self.path / "launch"

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        return self.errors / f"rank{rank}.json"

    def figures(self, rank: int) -> Path:
        """What rank ``rank`` measured; the driver puts these together into result.json."""
        return self.launch / f"rank{rank}.json"

    def stack(self, rank: int) -> Path:
        """Where the threads of rank ``rank`` stood when it was told to end."""
        return self.launch / f"stack{rank}.txt"

    @property
    def reserve(self) -> Path:
        """Room that is given up for the last words of a run whose disk is full."""
        return self.launch / "reserve"

    @property
    def elastic(self) -> Path:
        """Scratch of torchrun's agent while the ranks run."""
        return self.launch / "elastic"

    @property
    def agent_log(self) -> Path:
        return self.launch / "agent.log"

    @property
    def spec(self) -> Path:
        return self.launch / "launch.json"

    @property
    def exits(self) -> Path:
        return self.launch / "exits.json"
