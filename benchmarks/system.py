"""One of the systems that take turns in a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import peer_env
from benchmarks.machine import ROOT
from benchmarks.pair import Pair, PairFailed

Replies = list[dict[str, Any]]


class System:
    """Its processes, one a rank and of one thread, started when they are first asked; a failure
    ends it for the rest of the run. See :class:`Pair` for ``command`` and ``interpreter``;
    ``start`` are the arguments of a first command of that name."""

    def __init__(
        self,
        command: Sequence[str],
        interpreter: str,
        ranks: int,
        *,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        self._command, self._interpreter, self._ranks = command, interpreter, ranks
        self._start = start
        self._pair: Pair | None = None
        self.started: dict[str, Any] = {}
        """What rank 0 replied to ``start``."""
        self.reason: str | None = None
        """Why it does not run."""
        if interpreter == "peers" and not peer_env.exists():
            self.reason = "no environment for it: python -m benchmarks peers"

    def ask(self, do: str, **arguments: Any) -> Replies | None:
        """The replies of all ranks; None where there is a ``reason``."""
        if self.reason is not None:
            return None
        try:
            return self._running().ask(do, **arguments)
        except PairFailed as failure:
            self.reason = str(failure)
            self.close()
            return None

    def _running(self) -> Pair:
        if self._pair is None:
            disk = ROOT / "build"
            self._pair = Pair(self._command, self._interpreter, self._ranks, threads=1, disk=disk)
            if self._start is not None:
                self.started = self._pair.ask("start", timeout=1800.0, **self._start)[0]
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None
