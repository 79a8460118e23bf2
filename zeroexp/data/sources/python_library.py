"""The text of Python's own standard library: real text that every machine with Python has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from zeroexp.data.sources.text import TextFiles
from zeroexp.errors import ConfigError, Problem

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
)
"""Folders that distributions pack differently (or not at all), so that machines agree on the
rest."""


def library_files(root: Path) -> list[Path]:
    """The library's ``.py`` files in the order of their names.

    Left out: tests, installed packages and the ``_sysconfigdata`` files that describe one machine's
    build.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        # Not entered at all: site-packages alone may hold ten times as many files.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        for name in names:
            path = Path(folder, name)
            if (
                path.suffix == ".py"
                and not name.startswith("_sysconfigdata")
                and path.stat().st_size
            ):
                found.append(path)
    return sorted(found, key=lambda f: f.relative_to(root).as_posix())


def open_library(val_fraction: float) -> TextFiles:
    """The source of ``data=stdlib``. Raises :class:`ConfigError` where the library's sources are
    not on disk."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = library_files(root) if root.is_dir() else []
    if not files:
        raise ConfigError(
            [
                Problem(
                    "data.kind",
                    f"this Python has no standard library sources in {root}.",
                    "Use data=text data.path=PATH",
                )
            ]
        )
    return TextFiles(f"the Python standard library in {root}", root, files, val_fraction)
