"""Records of a file that are read, changed and written back through the slots of a ring."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.errors import FileError, SwapError
from zeroexp.ops import checksum
from zeroexp.tiers.file import FileEngine
from zeroexp.tiers.pending import Pending
from zeroexp.tiers.ring import Ring, Slot, SlotState, whole_blocks
from zeroexp.tiers.traffic import CountedTransfer, Traffic


class SwapFile:
    """A file of ``len(record_bytes)`` records, made anew at ``path``, its blocks allocated.

    A record is open in a slot of ``ring`` (:meth:`open` to :meth:`keep` or :meth:`drop`), or moves
    between the file and the caller's memory (:meth:`load`, :meth:`store`). Each starts at a
    multiple of 4096 bytes. One that was never written reads as zeros. Several files may share
    engine, ring and ``traffic``; one thread at a time calls those of one ring.

    * **Order.** A read that follows a write of the same record waits for it and then reads the
      file: bytes are never stale, and what a step moves does not depend on the speed of the disk.
    * **Checks.** The sum of a record is taken when it is written, kept in memory (8 bytes a record)
      and compared before its bytes are handed out, unless ``checksum`` is False.
    * **Errors.** One of a background write is raised by the next call on this file, which then does
      nothing else, or by :meth:`flush` or :meth:`close`; a record whose write failed raises it
      again whenever it is read, until it is written anew.

    Raises FileError where the file cannot be made, ValueError for records that make no sense; so do
    all methods for a record that does not exist, and for calls out of order.
    """

    def __init__(
        self,
        engine: FileEngine,
        path: str | os.PathLike[str],
        record_bytes: Sequence[int],
        ring: Ring,
        traffic: Traffic,
        *,
        checksum: bool = True,
    ) -> None:
        if any(num_bytes < 0 for num_bytes in record_bytes):
            raise ValueError(f"SwapFile {path}: a record of {min(record_bytes)} bytes")
        self.path = Path(path)
        self.record_bytes = tuple(record_bytes)
        self._offsets = tuple(accumulate(map(whole_blocks, record_bytes), initial=0))
        self._ring = ring
        self._traffic = traffic
        self._checked = checksum
        self._sums = array("Q", bytes(8 * len(record_bytes)))
        self._written = bytearray(len(record_bytes))
        self._slots: dict[int, Slot] = {}  # whatever their state
        self._stores: dict[int, Pending] = {}
        self._loads: dict[int, list[Pending]] = {}
        self._lost: dict[int, FileError] = {}
        self._unreported: list[FileError] = []
        self._closed = False
        self._file = engine.create(path, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file: the records, each rounded up to 4096."""
        return self._offsets[-1]

    def prefetch(self, record: int) -> bool:
        """Starts to read a record, so that :meth:`open` finds it there.

        False where that has to wait: no slot is free, or the record is still being written. Never
        waits for the disk.
        """
        self._begin_call(record)
        self._check_fits_slot(record)
        slot = self._slots.get(record)
        if slot is not None:
            return slot.state is not SlotState.WRITING
        if record in self._stores:
            return False
        if not self._written[record]:  # nothing to read
            return True
        self._check_not_lost(record)
        slot = self._ring.take(must=False)
        if slot is None:
            return False
        self._begin_read(record, slot)
        return True

    def open(self, record: int) -> Tensor:
        """The bytes of a record (uint8, in a slot): the caller's until :meth:`keep` or
        :meth:`drop`.

        Raises FileError, SwapError, and ValueError where all slots are the caller's already.
        """
        self._begin_call(record)
        self._check_fits_slot(record)
        slot = self._slots.get(record)
        if slot is not None and slot.state is SlotState.TAKEN:
            raise ValueError(f"SwapFile {self.path}: record {record} is open already")
        self._finish_writes(record)
        self._check_not_lost(record)
        slot = self._slots.get(record)
        if slot is None:
            slot = self._ring.take(must=True)
            assert slot is not None  # must
            if self._written[record]:
                self._begin_read(record, slot)
            else:
                self._occupy(record, slot)
                return slot.memory[: self.record_bytes[record]].zero_()
        data = slot.memory[: self.record_bytes[record]]
        assert slot.transfer is not None  # it is READING
        try:
            slot.transfer.wait()
            self._verify(record, data)
        except (FileError, SwapError):
            self._leave(slot)
            raise
        self._ring.arrived(slot)
        return data

    def keep(self, record: int) -> None:
        """Writes an open record in the background; its bytes are no longer the caller's."""
        self._begin_call(record)
        slot = self._opened(record)
        self._finish_loads(record)
        self._note_write(record, slot.memory[: self.record_bytes[record]])
        size = whole_blocks(self.record_bytes[record])
        transfer = self._submit(record, slot.memory[:size], write=True)
        self._ring.begin(slot, SlotState.WRITING, transfer)

    def drop(self, record: int) -> None:
        """Gives the slot of an open record back unwritten: the file keeps what it had."""
        self._begin_call(record)
        self._leave(self._opened(record))

    def load(self, record: int, into: Tensor) -> Pending:
        """Starts to read a record into the caller's memory; :meth:`Pending.wait` ends it.

        ``into``: a contiguous CPU tensor of the record's size, of any dtype.
        """
        self._begin_call(record)
        self._check_memory("load", record, into)
        self._finish_writes(record)
        self._check_not_lost(record)
        if not self._written[record]:
            into.detach().view(-1).view(torch.uint8).zero_()
            return Pending(None)
        transfer = self._submit(record, into, write=False)
        pending = Pending(transfer, lambda error: self._loaded(record, into, error))
        others = [load for load in self._loads.get(record, ()) if not load.ended]
        self._loads[record] = [*others, pending]
        return pending

    def store(self, record: int, source: Tensor) -> Pending:
        """Starts to write a record from the caller's memory, as :meth:`load`; ``source`` must not
        change before :meth:`Pending.wait`.
        """
        self._begin_call(record)
        self._check_memory("store", record, source)
        self._finish_writes(record)
        self._finish_loads(record)
        if record in self._slots:  # prefetched: what is there is old now
            self.vacate(self._slots[record])
        self._note_write(record, source)
        transfer = self._submit(record, source, write=True)
        pending = Pending(transfer, lambda error: self._stored(record, error), self._reported)
        self._stores[record] = pending
        return pending

    def flush(self) -> None:
        """Waits for every write; raises the first FileError that was not raised before."""
        self._check_open()
        self._finish_all_writes()
        self._raise_unreported()

    def close(self) -> None:
        """Waits for everything, gives all slots back and closes the file. Raises as flush."""
        if self._closed:
            return
        self._finish_all_writes()
        for record in list(self._loads):
            self._finish_loads(record)
        for slot in list(self._slots.values()):
            if slot.state is SlotState.TAKEN:
                self._leave(slot)
            else:
                self.vacate(slot)
        self._closed = True
        self._file.close()
        self._raise_unreported()

    def vacate(self, slot: Slot) -> None:
        """For the ring, which needs a slot that this file reads into or writes from."""
        record, writing = slot.record, slot.state is SlotState.WRITING
        assert slot.transfer is not None  # READING or WRITING
        try:
            slot.transfer.wait()
        except FileError as error:
            if writing:  # nobody has seen what was read: reading it again tells the same
                self._fail(record, error)
        self._leave(slot)

    # -- slots -------------------------------------------------------------------------------------

    def _occupy(self, record: int, slot: Slot) -> None:
        slot.occupant, slot.record = self, record
        self._slots[record] = slot

    def _leave(self, slot: Slot) -> None:
        del self._slots[slot.record]
        self._ring.give(slot)

    def _opened(self, record: int) -> Slot:
        slot = self._slots.get(record)
        if slot is None or slot.state is not SlotState.TAKEN:
            raise ValueError(f"SwapFile {self.path}: record {record} is not open")
        return slot

    def _begin_read(self, record: int, slot: Slot) -> None:
        self._occupy(record, slot)
        size = whole_blocks(self.record_bytes[record])
        try:
            transfer = self._submit(record, slot.memory[:size], write=False)
        except BaseException:
            self._leave(slot)
            raise
        self._ring.begin(slot, SlotState.READING, transfer)

    # -- transfers ---------------------------------------------------------------------------------

    def _submit(self, record: int, memory: Tensor, *, write: bool) -> CountedTransfer:
        submit = self._file.submit_write if write else self._file.submit_read
        transfer = submit(memory, self._offsets[record])
        num_bytes = memory.numel() * memory.element_size()
        return self._traffic.count(transfer, num_bytes, write=write)

    def _note_write(self, record: int, data: Tensor) -> None:
        if self._checked:
            self._sums[record] = checksum(data, seed=record)
        self._written[record] = 1
        self._lost.pop(record, None)

    def _verify(self, record: int, data: Tensor) -> None:
        if not self._checked:
            return
        expected, found = self._sums[record], checksum(data, seed=record)
        if found == expected:
            return
        offset, num_bytes = self._offsets[record], self.record_bytes[record]
        raise SwapError(
            f"record {record} of {self.path} (bytes {offset} to {offset + num_bytes}) is not what "
            f"was written there: its checksum is {found:016x}, expected {expected:016x}. The disk "
            "is failing or something else wrote to the file; nothing of it was used. Let nothing "
            "else write there, look at the disk (dmesg), and resume from a checkpoint",
            path=str(self.path),
            record=record,
            offset=offset,
            num_bytes=num_bytes,
            expected=expected,
            found=found,
        )

    def _finish_writes(self, record: int) -> None:
        """No write of the record is open after this."""
        slot = self._slots.get(record)
        if slot is not None and slot.state is SlotState.WRITING:
            self.vacate(slot)
        store = self._stores.get(record)
        if store is not None:
            store.finish()
        if self._unreported:
            self._raise_unreported()

    def _finish_loads(self, record: int) -> None:
        """No read of the record into the caller's memory is open after this."""
        for load in self._loads.get(record, ()):
            load.finish()
        self._loads.pop(record, None)

    def _finish_all_writes(self) -> None:
        for slot in [s for s in self._slots.values() if s.state is SlotState.WRITING]:
            self.vacate(slot)
        for store in list(self._stores.values()):
            store.finish()

    def _loaded(self, record: int, into: Tensor, error: FileError | None) -> Exception | None:
        if error is None:
            try:
                self._verify(record, into)
            except SwapError as mismatch:
                return mismatch
        return error

    def _stored(self, record: int, error: FileError | None) -> Exception | None:
        del self._stores[record]
        if error is not None:
            self._fail(record, error)
        return error

    # -- errors ------------------------------------------------------------------------------------

    def _begin_call(self, record: int) -> None:
        self._check_open()
        if not 0 <= record < len(self.record_bytes):
            raise ValueError(
                f"SwapFile {self.path}: record is {record}; there are {len(self.record_bytes)}"
            )
        for slot in list(self._slots.values()):
            transfer = slot.transfer
            if slot.state is SlotState.WRITING and transfer is not None and transfer.over:
                self.vacate(slot)
        for store in list(self._stores.values()):
            if store.over:
                store.finish()
        if self._unreported:
            self._raise_unreported()

    def _fail(self, record: int, error: FileError) -> None:
        self._lost[record] = error
        self._unreported.append(error)

    def _reported(self, error: Exception) -> None:
        self._unreported = [other for other in self._unreported if other is not error]

    def _raise_unreported(self) -> None:
        if self._unreported:
            first = self._unreported[0]
            self._unreported.clear()
            raise first

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"SwapFile {self.path}: it is closed")

    def _check_not_lost(self, record: int) -> None:
        if record in self._lost:
            raise self._lost[record]

    def _check_fits_slot(self, record: int) -> None:
        if self.record_bytes[record] > self._ring.slot_bytes:
            raise ValueError(
                f"SwapFile {self.path}: record {record} has {self.record_bytes[record]} bytes, a "
                f"slot of the ring {self._ring.slot_bytes}; load and store it from memory of yours"
            )

    def _check_memory(self, what: str, record: int, memory: Tensor) -> None:
        num_bytes = memory.numel() * memory.element_size()
        if num_bytes != self.record_bytes[record] or not memory.is_contiguous():
            raise ValueError(
                f"SwapFile {self.path}: {what} of record {record} with memory of {num_bytes} bytes "
                f"(shape {tuple(memory.shape)}, strides {memory.stride()}); wanted "
                f"{self.record_bytes[record]} contiguous bytes"
            )
        slot = self._slots.get(record)
        if slot is not None and slot.state is SlotState.TAKEN:
            raise ValueError(
                f"SwapFile {self.path}: {what} of record {record}, which is open; keep or drop it "
                "first"
            )
