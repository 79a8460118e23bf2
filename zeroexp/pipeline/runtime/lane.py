"""One direction of one boundary between two stages on different ranks.

A sender and its receiver remember the structure of their last message. A message of the same
structure is one send; any other is announced in the place where the receiver expects the old one,
and a header follows. A run that fails announces that instead, so nobody waits for what will not
come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm import Pending
from zeroexp.comm.group import post
from zeroexp.comm.pool import BufferPool
from zeroexp.ledger import Ledger
from zeroexp.pipeline.runtime.message import (
    FAILED,
    PREFIX,
    SAME,
    Message,
    Structure,
    mark_of,
    pack,
    places,
)


class Way(IntEnum):
    """What a lane carries: activations to the next stage, gradients to the one before."""

    ACTIVATION = 0
    GRADIENT = 1


class Part(IntEnum):
    """What a transfer is; part of its tag."""

    MESSAGE = 0
    HEADER = 1
    FRESH = 2


class PeerFailed(Exception):
    """The sender's run has failed; its error is told when all ranks meet."""


Started = tuple[dist.Work, Tensor]
"""A transfer under way and the buffer that must outlive it."""


class Wire:
    """Sends and receives of one lane, as tagged point-to-point calls."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        tag: Callable[[Part], int],
        ledger: Ledger,
        timeout: float,
    ) -> None:
        self._group, self.peer, self._tag = group, peer, tag
        self.ledger, self._timeout = ledger, timeout

    def send(self, buffer: Tensor, part: Part) -> Started:
        return post(dist.isend, buffer, self.peer, self._group, self._tag(part)), buffer

    def recv(self, buffer: Tensor, part: Part) -> Started:
        return post(dist.irecv, buffer, self.peer, self._group, self._tag(part)), buffer

    def wait(self, started: Started, what: str) -> None:
        """Raises :class:`zeroexp.errors.CollectiveTimeout` naming the peer."""
        work, buffer = started
        Pending([(self.peer, work)], what, self._timeout, keep=(buffer,)).wait()


class Outbox:
    """The sending end."""

    WINDOW = 2
    """Messages under way. gloo does not say when a send is over without waiting for it, so the
    buffer of message k is free again when message k + 2 is sent. No list that is valid for blocking
    sends can stop here: this waits later than they would."""

    def __init__(self, wire: Wire, pool: BufferPool) -> None:
        self._wire = wire
        self._pool = pool
        self._structure: Structure | None = None
        self._going: deque[tuple[str, list[Started], Tensor]] = deque()
        self.owed = 0
        """Messages that this run has still to send."""

    def send(self, structure: Structure, tensors: list[Tensor], what: str) -> None:
        """Start sending a message; ``tensors`` are copied at once."""
        while len(self._going) >= self.WINDOW:
            self._finish_first()
        going = []
        raw = self._pool.take(structure.nbytes, torch.uint8)
        buffer = raw[: structure.nbytes]
        pack(buffer, SAME, structure, tensors)
        overhead = structure.nbytes - structure.payload
        if structure == self._structure:
            going.append(self._wire.send(buffer, Part.MESSAGE))
        else:
            header = structure.encode()
            going.append(self._announce(len(header)))
            letters = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            going.append(self._wire.send(letters, Part.HEADER))
            going.append(self._wire.send(buffer, Part.FRESH))
            overhead += PREFIX + len(header)
            self._structure = structure
        self._going.append((what, going, raw))
        self.owed -= 1
        self._wire.ledger.sent("send", structure.payload)
        self._wire.ledger.sent_control(overhead)

    def _announce(self, mark: int) -> Started:
        # Shorter than what the receiver is ready for, which gloo allows.
        stub = torch.zeros(PREFIX, dtype=torch.uint8)
        stub[:8].view(torch.int64).fill_(mark)
        return self._wire.send(stub, Part.MESSAGE)

    def fail(self) -> None:
        """Tell the receiver that what this run owes it will not come."""
        if self.owed:
            notice = self._announce(FAILED)
            self._going.append(("a failure's notice", [notice], torch.empty(0)))
            self._wire.ledger.sent_control(PREFIX)
            self.owed = 0

    def _finish_first(self) -> None:
        what, going, raw = self._going[0]
        for started in going:
            self._wire.wait(started, what)
        self._going.popleft()
        if raw.numel():
            self._pool.give(raw)

    def flush(self) -> None:
        """Wait until the receiver has everything."""
        while self._going:
            self._finish_first()


class Inbox:
    """The receiving end. One receive is open ahead of the list, so that the next message arrives
    while the rank computes."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._device = device
        self._structure: Structure | None = None
        self._open: Started | None = None
        self._expected: deque[tuple[int, str]] = deque()
        self._arrived: dict[int, Message] = {}
        self.owed = 0
        """Messages of this run that have not been opened."""

    def begin(self, owed: int) -> None:
        self.owed = owed
        self._expected.clear()
        self._arrived.clear()
        self._post()

    def expect(self, micro_batch: int, what: str) -> None:
        """The list receives here. Messages expected before are waited for, as blocking receives
        would have done."""
        while self._expected:
            self._resolve()
        self._expected.append((micro_batch, what))
        self._post()

    def take(self, micro_batch: int) -> Message:
        """The structure and tensors of a micro-batch's message, once.

        Raises :class:`PeerFailed`, and :class:`zeroexp.errors.CollectiveTimeout` naming the rank.
        """
        while micro_batch not in self._arrived:
            self._resolve()
        return self._arrived.pop(micro_batch)

    def _post(self) -> None:
        # One at a time: the structure to be ready for is known when the last message is open.
        if self._open is None and self.owed:
            nbytes = PREFIX if self._structure is None else self._structure.nbytes
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._open = self._wire.recv(buffer, Part.MESSAGE)

    def _resolve(self) -> None:
        micro_batch, what = self._expected.popleft()
        opened = self._next(what)
        self._arrived[micro_batch] = opened
        self._post()

    def _next(self, what: str) -> Message:
        self._post()
        if self._open is None:
            raise RuntimeError(f"{what}: more messages are taken than the run has")
        started, self._open = self._open, None
        self._wire.wait(started, what)
        _, buffer = started
        mark = mark_of(buffer)
        if mark == FAILED:
            self.owed = 0
            raise PeerFailed(what)
        if mark != SAME:
            header = torch.empty(mark, dtype=torch.uint8)
            self._wire.wait(self._wire.recv(header, Part.HEADER), what)
            self._structure = Structure.decode(bytes(header.tolist()))
            buffer = torch.empty(self._structure.nbytes, dtype=torch.uint8)
            self._wire.wait(self._wire.recv(buffer, Part.FRESH), what)
        self.owed -= 1
        structure = self._structure
        if structure is None:
            raise RuntimeError(f"{what}: a message came before its header")
        tensors = places(buffer, structure)
        if self._device.type != "cpu":
            tensors = [tensor.to(self._device) for tensor in tensors]
        return Message(structure, tensors)

    def drain_next(self) -> None:
        """Take and drop the next message of a failed run: its sender may be waiting for that."""
        self._arrived.clear()
        if self.owed:
            with suppress(PeerFailed):
                self._next("the rest of a failed run")
