"""Every error a user of zeroexp can meet, with the text they read.

Each error is one message that says what is wrong and how to mend it. :class:`ConfigError` collects
all problems of a configuration at once; the others belong to a run that has started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ZeroexpError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    ``key`` is the dotted key (``zero.stage``), ``problem`` what is wrong with it, ``fix`` what to
    write instead.
    """

    key: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.problem} {self.fix}".strip()


class ConfigError(ZeroexpError):
    """The configuration cannot run; carries every problem that was found (exit code 2)."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        width = max((len(p.key) for p in self.problems), default=0)
        # Fixes stand in a column of their own; a long problem pushes only its own fix to the right.
        column = max((len(p.problem) for p in self.problems if len(p.problem) <= 48), default=0)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the configuration"]
        for p in self.problems:
            lines.append(f"  {p.key:<{width}}  {p.problem:<{column}}  {p.fix}".rstrip())
        super().__init__("\n".join(lines))


class ModelError(ZeroexpError):
    """The model cannot be sharded or was used in a way the engine cannot make right."""


class OptimizerError(ZeroexpError):
    """The optimizer does not fit the model or the chosen ZeRO stage."""


class ScheduleError(ZeroexpError):
    """A pipeline's action list is incomplete, out of order or blocks itself.

    ``rank``, ``position`` (in the rank's list, from 0) and ``action`` (its text, ``F3.1``) say
    where; None where the text at fault is not in a list.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.action = action


class StageError(ZeroexpError):
    """A stage of the pipeline failed; every rank raises the same, where it failed with the cause.

    ``rank`` is the global rank on which it failed, ``stage`` and ``action`` (its text, ``F3.1``)
    what failed there; None before the first action.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        action: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.action = action
        self.rank = rank


class RankMismatch(ZeroexpError):
    """The ranks disagree about something they must agree on (model, order, shapes)."""


class CollectiveTimeout(ZeroexpError):
    """A collective met its deadline; the message names it and the ranks that did not take part."""


class NonFiniteError(ZeroexpError):
    """A gradient or loss is not finite and ``precision.nonfinite`` is ``stop`` (run status
    ``nan``).
    """


class FileError(ZeroexpError, OSError):
    """A file could not be opened, made, read or written; also an ``OSError``.

    ``errno`` and ``filename`` are those of OSError (ENODATA where a file ends before the bytes
    wanted). All in bytes: ``offset`` in the file where it failed, ``wanted`` and ``done`` of the
    whole request, ``free`` in the file system at that moment (None: unknown).
    """

    def __init__(
        self,
        errno: int,
        message: str,
        path: str,
        *,
        offset: int = 0,
        wanted: int = 0,
        done: int = 0,
        free: int | None = None,
    ) -> None:
        super().__init__(errno, message, path)
        self.offset = offset
        self.wanted = wanted
        self.done = done
        self.free = free

    def __str__(self) -> str:
        return str(self.strerror)


class SwapError(ZeroexpError):
    """A record of a swap file is not what was written there: it never reaches a weight.

    ``path``, ``record`` (its number), ``offset`` and ``num_bytes`` (in the file) say where;
    ``expected`` and ``found`` are checksums.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        record: int = 0,
        offset: int = 0,
        num_bytes: int = 0,
        expected: int = 0,
        found: int = 0,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.record = record
        self.offset = offset
        self.num_bytes = num_bytes
        self.expected = expected
        self.found = found


class CheckpointError(ZeroexpError):
    """A checkpoint is missing, incomplete, or does not fit the model."""
