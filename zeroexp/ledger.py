"""What really happened: every byte of state the engine holds and every byte it sends, tagged as it
happens.

The planner predicts from the layout, the ledger records from allocations and calls; neither copies
from the other, so that holding them against each other proves something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from zeroexp.placement import Tier

STATE_KINDS = ("params", "grads", "optim")
"""Resident between steps. Two further kinds are transient: ``whole`` (gathered parameters),
``workspace`` (gradient and receive buffers that are reused from step to step)."""


class Holding(NamedTuple):
    """Bytes of one kind that one unit holds on one tier; ``padding`` of them belong to no
    parameter."""

    nbytes: int
    padding: int = 0


_Key = tuple[str, str, Tier, str]
"""Unit, kind, tier, label."""


class Ledger:
    """Bytes held and bytes sent by this rank."""

    def __init__(self) -> None:
        self._held: dict[_Key, Holding] = {}
        self._total: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._control = 0
        self._at_last_step: Counter[str] = Counter()
        self._last_step: dict[str, int] = {}
        self._moved: Counter[str] = Counter()
        self._moved_at_last_step: Counter[str] = Counter()
        self._moved_last_step: dict[str, int] = {}
        self._parked: dict[str, list[tuple[_Key, _Key]]] = {}

    # -- bytes held --------------------------------------------------------------------------------

    def hold(
        self, unit: str, kind: str, tier: Tier, nbytes: int, *, label: str = "", padding: int = 0
    ) -> None:
        """From now on ``unit`` holds ``nbytes`` of ``kind`` on ``tier`` under ``label`` (0: nothing
        any more)."""
        key = (unit, kind, tier, label)
        before = self._held.pop(key, Holding(0))
        if nbytes:
            self._held[key] = Holding(nbytes, padding)
        self._total[kind] += nbytes - before.nbytes
        self._peak[kind] = max(self._peak[kind], self._total[kind])

    def park(self, kind: str, to: Tier) -> None:
        """All that is held of ``kind`` on the tiers above ``to`` lies there until
        :meth:`unpark`."""
        tiers = list(Tier)
        above = tiers[: tiers.index(to)]
        moves = [
            (key, (key[0], kind, to, f"{key[3]} from {key[2].value}"))
            for key in self._held
            if key[1] == kind and key[2] in above
        ]
        for before, now in moves:
            self._held[now] = self._held.pop(before)
        self._parked[kind] = moves

    def unpark(self, kind: str) -> None:
        """What :meth:`park` moved is back."""
        for before, now in self._parked.pop(kind):
            self._held[before] = self._held.pop(now)

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Resident bytes ``{params|grads|optim: {device|cpu|nvme: bytes}}`` of this rank, padding
        included."""
        out = {kind: {tier.value: 0 for tier in Tier} for kind in STATE_KINDS}
        for (_, kind, tier, _), holding in self._held.items():
            if kind in out:
                out[kind][tier.value] += holding.nbytes
        return out

    def padding_bytes(self) -> int:
        """Bytes of :meth:`state_bytes` that belong to no parameter."""
        return sum(h.padding for (_, kind, _, _), h in self._held.items() if kind in STATE_KINDS)

    def live_bytes(self, kind: str) -> int:
        """Bytes of one kind held at this moment."""
        return self._total[kind]

    def peak_bytes(self, kind: str) -> int:
        """The most that :meth:`live_bytes` has been since :meth:`reset_peaks`."""
        return self._peak[kind]

    def reset_peaks(self) -> None:
        self._peak = Counter(self._total)

    def holders(self, kind: str) -> Iterable[str]:
        """Units that hold bytes of ``kind`` now."""
        return sorted({unit for (unit, k, _, _) in self._held if k == kind})

    # -- bytes sent --------------------------------------------------------------------------------

    def sent(self, op: str, nbytes: int) -> None:
        """``nbytes`` left this rank in a collective ``op`` (``all_gather``, ``reduce_scatter``,
        ...)."""
        self._sent[op] += nbytes

    def sent_control(self, nbytes: int) -> None:
        """Flags, norms and other scalars; kept apart from the traffic of the model."""
        self._control += nbytes

    def mark_step(self) -> None:
        """A step ends here: what was sent since the last mark is the traffic of this step."""
        delta = self._sent - self._at_last_step
        self._last_step = {op: n for op, n in sorted(delta.items()) if n}
        self._at_last_step = Counter(self._sent)
        self._moved_last_step = dict(self._moved - self._moved_at_last_step)
        self._moved_at_last_step = Counter(self._moved)

    def comm_bytes(self) -> dict[str, int]:
        """Bytes sent so far by op, control traffic under ``control``."""
        out = {op: n for op, n in sorted(self._sent.items()) if n}
        if self._control:
            out["control"] = self._control
        return out

    def comm_bytes_per_step(self) -> dict[str, int]:
        """Bytes sent by op during the last complete step, evaluation passes before it included."""
        return dict(self._last_step)

    # -- bytes between tiers -----------------------------------------------------------------------

    def moved(self, way: str, nbytes: int) -> None:
        """``nbytes`` went ``down`` from the device to a tier below it, or ``up``. On a machine
        whose device is its CPU they may have been written there in the first place: what counts is
        on which side of the border they were made and used."""
        self._moved[way] += nbytes

    def transfer_bytes_per_step(self) -> dict[str, int]:
        """Bytes that went ``down`` and ``up`` during the last complete step, evaluation passes
        before it included."""
        return {way: n for way, n in sorted(self._moved_last_step.items()) if n}
