"""Files that a reader sees old or new, never half: written beside their place, then renamed into
it. That holds when a process is killed; nothing is forced to disk (fsync), which takes seconds on a
busy one and would keep a failing rank from ending.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) in one rename; raises ``OSError`` and leaves the old
    file if it cannot.
    """
    # The name carries the process: two ranks may write the same file at the same moment.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        if error.filename is None:  # a write does not know its file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity replaced by None: JSON has neither, and unknown is
    null.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as indented strict JSON (keys become strings, non-finite numbers null),
    atomically.
    """
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in ``path``, or None when the file is missing, unreadable or not a mapping."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
