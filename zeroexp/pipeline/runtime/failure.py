"""What went wrong on a rank, as the others are told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zeroexp.errors import StageError
from zeroexp.pipeline.action import Action

Note = dict[str, Any]
"""A failure as JSON holds it; empty on a rank that was only told of one."""


def failure_of(error: Exception, action: Action | None, rank: int) -> Note:
    """The note of an error in ``action`` (None: before the first) on global rank ``rank``."""
    where = "start of the run" if action is None else f"{action}, stage {action.stage}"
    return {
        "at": time.time(),
        "text": f"rank {rank}, {where}: {type(error).__name__}: {error}",
        "stage": None if action is None else action.stage,
        "action": None if action is None else str(action),
        "rank": rank,
    }


def first_of(notes: Sequence[Note | None]) -> StageError:
    """The error of the earliest failure: what every rank raises."""
    first = min((note for note in notes if note), key=lambda note: float(note["at"]))
    return StageError(
        first["text"], stage=first["stage"], action=first["action"], rank=first["rank"]
    )
