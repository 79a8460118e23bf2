"""A process that waits for its turn at the disk: told by a line what to do, it answers with
seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.machine import ROOT


class Unavailable(Exception):
    """A contender that cannot run here; the message is the reason."""


class Contender:
    """``tell`` and then ``answer``: so that several of them work at the same time."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process = process
        self._errors = errors
        self.pid = process.pid

    def tell(self, what: str) -> None:
        """Start what the first letter of ``what`` stands for: read, write or mixed."""
        assert self._process.stdin is not None  # as asked for below
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(what[0] + "\n")
            self._process.stdin.flush()

    def answer(self) -> str:
        """Its next line. Raises Unavailable with its last words where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise Unavailable(last_line(self._errors.read()))
        return line

    def run(self, what: str) -> float:
        """Seconds of one pass."""
        self.tell(what)
        return float(self.answer())


@contextmanager
def contender(command: list[str], variables: Mapping[str, str], ready: bool) -> Iterator[Contender]:
    """Starts it; ``ready``: it says so in a line, else its first pass shows that it works. Raises
    Unavailable."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # A group of its own: what it starts to build extensions ends with it.
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{Path(command[0]).name}: {error.strerror}") from error
        one = Contender(process, errors)
        try:
            if ready:
                one.answer()
            else:
                one.run("read")
            yield one
        finally:
            with suppress(ProcessLookupError):  # nobody of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(text: str) -> str:
    """What a program said last, without the place of this checkout."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output").replace(str(ROOT), ".")
