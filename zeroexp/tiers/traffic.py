"""What the files of one rank moved, and how long somebody waited for it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from zeroexp.errors import FileError
from zeroexp.tiers.file import Transfer


@dataclass(frozen=True)
class Moved:
    """Bytes ``read`` and ``written``; seconds the caller ``waited``, and seconds in which at least
    one transfer was open (``busy``).
    """

    read: int = 0
    written: int = 0
    waited: float = 0.0
    busy: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """The rate while something moved; None where nothing did."""
        return (self.read + self.written) / self.busy if self.busy > 0 else None

    def __sub__(self, other: Moved) -> Moved:
        return Moved(
            self.read - other.read,
            self.written - other.written,
            self.waited - other.waited,
            self.busy - other.busy,
        )


class Traffic:
    """Counts transfers, since the start and by step, of any number of files and threads.

    Bytes belong to the step that asked for them, so that they do not depend on the speed of the
    disk; what a failed transfer left undone is taken off again. Times belong to the step in which
    the transfer was waited for.
    """

    def __init__(self) -> None:
        self.read = 0
        self.written = 0
        self.waited = 0.0
        self.busy = 0.0
        self.last_step = Moved()
        self._at_last_step = Moved()
        self._lock = threading.Lock()
        self._open: dict[CountedTransfer, float] = {}
        # When something moved, disjoint and in order, as far back as an open transfer can reach.
        self._spans: list[tuple[float, float]] = []

    @property
    def total(self) -> Moved:
        """Everything since the start."""
        with self._lock:
            return Moved(self.read, self.written, self.waited, self.busy)

    def mark_step(self) -> None:
        """Ends a step: :attr:`last_step` is what came since the last call."""
        total = self.total
        self.last_step = total - self._at_last_step
        self._at_last_step = total

    def count(self, transfer: Transfer, num_bytes: int, *, write: bool) -> CountedTransfer:
        """Counts a transfer that has just been submitted; wait for what this returns."""
        counted = CountedTransfer(self, transfer, write)
        with self._lock:
            self._add(num_bytes, write)
            self._open[counted] = time.monotonic()
        return counted

    def _add(self, num_bytes: int, write: bool) -> None:
        if write:
            self.written += num_bytes
        else:
            self.read += num_bytes

    def _end(self, counted: CountedTransfer, ended: float) -> None:
        start = self._open.pop(counted)
        # A short transfer may have ended before its submission was noted.
        first, last = start, max(start, ended)
        before = 0.0
        apart = []
        for span in self._spans:
            if span[1] < first or span[0] > last:
                apart.append(span)
            else:
                before += span[1] - span[0]
                first, last = min(first, span[0]), max(last, span[1])
        self.busy += last - first - before
        # Transfers are noted in order: the first open one began first, and later ones begin later
        # than every end.
        oldest = next(iter(self._open.values()), None)
        if oldest is None:
            self._spans = []
        else:
            self._spans = sorted(s for s in [*apart, (first, last)] if s[1] >= oldest)


class CountedTransfer:
    """A :class:`Transfer` whose end is counted once."""

    __slots__ = ("_counted", "_traffic", "_transfer", "_write")

    def __init__(self, traffic: Traffic, transfer: Transfer, write: bool) -> None:
        self._traffic = traffic
        self._transfer = transfer
        self._write = write
        self._counted = False

    @property
    def over(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._transfer.over

    def wait(self) -> None:
        """As Transfer.wait. Raises FileError."""
        traffic, undone = self._traffic, 0
        begin = time.monotonic()
        try:
            self._transfer.wait()
        except FileError as error:
            undone = error.wanted - error.done
            raise
        finally:
            with traffic._lock:
                traffic.waited += time.monotonic() - begin
                # Ctrl-C ends the wait, not the transfer.
                if self._transfer.ended and not self._counted:
                    self._counted = True
                    traffic._add(-undone, self._write)
                    traffic._end(self, self._transfer.ended)
