"""What a run shows while it goes: rank 0's output as it comes, its progress in one line, and how it
ended.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import IO

# A progress line as record.progress_line writes it; on a terminal each one replaces the one before.
_PROGRESS = re.compile(r"^step +\d+(/\d+)? ")

#: Written to a rank's log before its traceback; what follows is not copied to the terminal.
FAILED_LINE = "zeroexp: this rank failed: rank "
#: Written to a rank's log when it is started again after a crash; copying goes on after it.
STARTED_LINE = "zeroexp: ranks started again: attempt "


class Follower:
    """Copies what is appended to a log file to ``out``, whole lines only.

    With ``live`` (a terminal) a progress line overwrites the progress line before it; otherwise
    every line is printed. ``show`` False reads nothing: the quiet mode.
    """

    def __init__(self, path: Path, out: IO[str], *, live: bool, show: bool = True) -> None:
        self._path = path
        self._out = out
        self._live = live
        self._show = show
        self._offset = 0
        self._rest = b""
        self._progress_shown = False
        self._hidden = False
        #: lines copied so far
        self.lines = 0

    def poll(self) -> None:
        """Copy the lines that have come since the last call."""
        if not self._show:
            return
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._print(line.decode("utf-8", errors="replace").rstrip("\r"))
        if lines:
            self._out.flush()

    def finish(self) -> None:
        """Copy what is left, also a last line without its end, and leave the cursor at the start of
        a line.
        """
        self.poll()
        if self._rest:
            self._print(self._rest.decode("utf-8", errors="replace"))
            self._rest = b""
        if self._progress_shown:
            self._out.write("\n")
            self._progress_shown = False
        self._out.flush()

    def _print(self, line: str) -> None:
        if line.startswith((FAILED_LINE, STARTED_LINE)):
            self._hidden = line.startswith(FAILED_LINE)
            return
        if self._hidden:
            return
        self.lines += 1
        if not self._live:
            self._out.write(line + "\n")
            return
        progress = bool(_PROGRESS.match(line))
        if progress:
            # A line wider than the terminal wraps, and then "\r" no longer returns to its start.
            line = line[: shutil.get_terminal_size().columns - 1]
        clear = "\r\x1b[K" if self._progress_shown else ""
        self._out.write(clear + line + ("" if progress else "\n"))
        self._progress_shown = progress
