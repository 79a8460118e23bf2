"""What happens when a rank fails or is told to stop: nobody waits for somebody who is gone.

* An exception on one rank must not start collectives on it: the others are not there. The strategy
  is *poisoned* then, and its teardown stays local.
* Callbacks that save on an exception run before the strategy hears of it. A full-state checkpoint
  needs every rank, so the ranks that want to save meet in the store first (no collective), for a
  few seconds.
* SIGTERM arrives at any moment and maybe at one rank only. Lightning runs collectives inside the
  signal handler; here the handler sets a flag, and the ranks agree on it within two batches.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.side_group import PendingSum, SideGroup

EXIT_SIGTERM = 128 + signal.SIGTERM
MEETING_SECONDS = 5.0


class Meeting:
    """A place in the process group's store where ranks wait for each other without collectives.

    ``number`` counts the meetings of this run, so that two of them do not mix.
    """

    def __init__(self, seconds: float = MEETING_SECONDS) -> None:
        self.seconds = seconds
        self.number = 0

    def everyone(self) -> bool:
        """True on every rank if all of them come here within ``seconds``, else false or gone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        self.number += 1
        key, size = f"zeroexp/meeting/{self.number}", dist.get_world_size()
        until = time.monotonic() + self.seconds
        try:
            store = dist.distributed_c10d._get_default_store()
            here = store.add(key, 1)
            while here < size and time.monotonic() < until:
                time.sleep(0.02)
                here = store.add(key, 0)
        except RuntimeError:  # the rank that holds the store is gone
            return False
        return here >= size


class Sigterm:
    """SIGTERM as a flag that the ranks agree on.

    Lightning installs its handler when a run starts; :meth:`install` replaces that one and keeps
    handlers that are not Lightning's. At the end of the run Lightning puts back what was there
    before.
    """

    def __init__(self, ns: Namespace) -> None:
        self._ns = ns
        self.received = False
        self._sum: PendingSum | None = None

    def install(self) -> None:
        """Take over from Lightning's handler (in the main thread, and not under Slurm)."""
        current = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            return
        if not isinstance(current, self._ns.HandlersCompose):
            return
        connector = self._ns.SignalConnector
        behind = {id(h): getattr(h, "__func__", None) for h in current.signal_handlers}
        if connector._sigterm_handler_fn in behind.values():
            return  # Slurm's requeue has handlers of its own
        others = [
            h
            for h in current.signal_handlers
            if behind[id(h)] is not connector._sigterm_notifier_fn
        ]
        self.received = False
        signal.signal(signal.SIGTERM, self._handler(others))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sum": None}

    def _handler(self, others: list[Any]) -> Callable[[int, Any], None]:
        def handle(signum: int, frame: Any) -> None:
            self.received = True
            for other in others:
                if callable(other):
                    other(signum, frame)

        return handle

    def stop_if_agreed(self, group: SideGroup) -> None:
        """Raise ``SIGTERMException`` (exit code 143) on every rank if any was told to stop.

        The ranks' flags of one batch are summed while that batch runs and looked at before the
        next one, so nobody waits for it.
        """
        if self._sum is not None and self._sum.result() > 0:
            self._sum = None
            self.received = True
            raise self._ns.SIGTERMException(EXIT_SIGTERM)
        self._sum = group.start_sum(int(self.received))

    def stop_if_received(self) -> None:
        """The same for this rank alone, where ranks need not be at the same place."""
        if self.received:
            raise self._ns.SIGTERMException(EXIT_SIGTERM)

    def forget(self) -> None:
        """Wait for the sum that is under way: the group must be quiet when a run ends."""
        if self._sum is not None:
            self._sum.result()
        self.drop()

    def drop(self) -> None:
        """Forget the sum without waiting (a rank is gone)."""
        self._sum = None
