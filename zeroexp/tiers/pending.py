"""A record on its way between a swap file and the caller's memory."""

from __future__ import annotations

from collections.abc import Callable

from zeroexp.errors import FileError
from zeroexp.tiers.traffic import CountedTransfer


class Pending:
    """A load or store of a swap file on its way."""

    __slots__ = ("_at_end", "_error", "_raised", "_transfer")

    def __init__(
        self,
        transfer: CountedTransfer | None,
        at_end: Callable[[FileError | None], Exception | None] | None = None,
        raised: Callable[[Exception], None] | None = None,
    ) -> None:
        self._transfer = transfer
        self._at_end = at_end
        self._raised = raised
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether somebody has waited for it."""
        return self._transfer is None

    @property
    def over(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._transfer is None or self._transfer.over

    def wait(self) -> None:
        """Returns when the memory is the caller's again: read and verified, or written. Raises
        FileError or SwapError, each time it is asked."""
        self.finish()
        if self._error is not None:
            if self._raised is not None:
                self._raised(self._error)
            raise self._error

    def finish(self) -> None:
        """Waits, and keeps the error for :meth:`wait`."""
        if self._transfer is None:
            return
        error: FileError | None = None
        try:
            self._transfer.wait()
        except FileError as failed:
            error = failed
        self._transfer = None
        if self._at_end is not None:
            self._error = self._at_end(error)
            self._at_end = None
