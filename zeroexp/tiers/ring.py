"""The host memory that records of swap files pass through."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from zeroexp.ops import HostRange
from zeroexp.tiers.traffic import CountedTransfer

BLOCK = 4096
"""What direct transfers are multiples of, in bytes."""


def whole_blocks(num_bytes: int) -> int:
    """``num_bytes`` rounded up to blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


class SlotState(Enum):
    """Who may touch a slot: nobody, the engine, its taker, the engine again."""

    FREE = "free"
    READING = "reading"
    TAKEN = "taken"
    WRITING = "writing"


class Occupant(Protocol):
    """Who put something into a slot."""

    def vacate(self, slot: Slot) -> None:
        """Waits for the transfer of a READING or WRITING slot, keeps its error, and gives the slot
        back."""
        ...


class Slot:
    """A piece of a ring: ``memory`` (uint8), and what is in it."""

    __slots__ = ("memory", "occupant", "record", "state", "transfer")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.state = SlotState.FREE
        self.occupant: Occupant | None = None
        self.record = -1
        self.transfer: CountedTransfer | None = None


class Ring:
    """``num_slots`` slots of ``slot_bytes`` bytes (rounded up to 4096), allocated once.

    Several swap files share one; one thread at a time. Raises ValueError for sizes that make no
    sense.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"Ring: {num_slots} slots of {slot_bytes} bytes; wanted at least 1")
        self.num_slots = num_slots
        self.slot_bytes = whole_blocks(slot_bytes)
        memory = HostRange(self.num_bytes)
        self._slots = tuple(
            Slot(memory.tensor(torch.uint8, self.slot_bytes, i * self.slot_bytes))
            for i in range(num_slots)
        )
        # The last one given back is taken first: its bytes may still be in a cache.
        self._free = list(reversed(self._slots))
        self._moving: dict[Slot, None] = {}  # READING and WRITING, the oldest first

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def take(self, *, must: bool) -> Slot | None:
        """A slot in state TAKEN: one that is free or whose write is over.

        Otherwise None, or with ``must`` the slot that can be had first: the oldest write is waited
        for, else the youngest prefetch is given up. Raises ValueError where there is neither.
        """
        slot = self._free[-1] if self._free else self._room(must)
        if slot is None:
            return None
        if slot.occupant is not None:
            slot.occupant.vacate(slot)
        self._free.remove(slot)
        slot.state = SlotState.TAKEN
        return slot

    def begin(self, slot: Slot, state: SlotState, transfer: CountedTransfer) -> None:
        """The engine has a TAKEN slot now: READING or WRITING."""
        slot.transfer = transfer
        slot.state = state
        self._moving[slot] = None

    def arrived(self, slot: Slot) -> None:
        """The read of a slot is over: it is TAKEN."""
        del self._moving[slot]
        slot.transfer = None
        slot.state = SlotState.TAKEN

    def give(self, slot: Slot) -> None:
        """A slot whose transfer was waited for, or that had none, is FREE."""
        self._moving.pop(slot, None)
        slot.transfer = slot.occupant = None
        slot.record = -1
        slot.state = SlotState.FREE
        self._free.append(slot)

    def _room(self, must: bool) -> Slot | None:
        writing = [slot for slot in self._moving if slot.state is SlotState.WRITING]
        for slot in writing:
            if slot.transfer is not None and slot.transfer.over:
                return slot
        if not must:
            return None
        if writing:
            return writing[0]
        if self._moving:
            return next(reversed(self._moving))
        raise ValueError(
            f"Ring: all {self.num_slots} slots of {self.slot_bytes} bytes "
            f"({self.num_bytes} bytes together) are open; keep or drop a record before another one "
            "is opened, or make the ring larger"
        )
