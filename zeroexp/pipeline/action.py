"""One thing a rank does in a pipeline: an action on one stage and one micro-batch.

Actions print as they are read in figures: ``F3.1`` is the forward of stage 3 on micro-batch 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from zeroexp.errors import ScheduleError


class Kind(str, Enum):
    """What an action does; the value is the code that it prints with.

    ``BACKWARD`` is the whole backward. ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT`` are its two
    halves (Qi et al., arXiv:2401.10241): the first gives the gradient that the stage before waits
    for, the second the gradients of the weights, which nobody waits for.
    """

    # Enum's own hash is a Python call; lists of a hundred thousand actions are looked up by it.
    __hash__ = str.__hash__

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    """Stage s sends its output to stage s+1."""
    RECV_ACTIVATION = "RA"
    """Stage s receives its input from stage s-1."""
    SEND_GRADIENT = "SG"
    """Stage s sends the gradient of its input to stage s-1."""
    RECV_GRADIENT = "RG"
    """Stage s receives the gradient of its output from stage s+1."""
    UNSHARD = "U"
    """The stage's parameters are gathered (ZeRO-3 inside a stage)."""
    RESHARD = "R"
    """The stage's gathered parameters are released."""
    REDUCE_GRADS = "G"
    """The stage's gradients, complete now, are reduced over its data-parallel group."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
MARKERS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRADS})
"""Actions on the whole stage: they have no micro-batch."""

_TEXT = re.compile(r"(F|B|I|W|SA|RA|SG|RG)(\d+)\.(\d+)|([URG])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """``stage`` counts all stages of the model, from 0; ``micro_batch`` is None for markers."""

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        name = f"{self.kind.value}{self.stage}"
        return name if self.micro_batch is None else f"{name}.{self.micro_batch}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def is_transfer(self) -> bool:
        return self.kind in SENDS or self.kind in RECEIVES

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a transfer."""
        after = self.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
        return self.stage + 1 if after else self.stage - 1

    @property
    def counterpart(self) -> Action:
        """The action of the other side of a transfer: for ``SA0.1`` it is ``RA1.1``."""
        return Action(_OTHER_SIDE[self.kind], self.peer_stage, self.micro_batch)


_OTHER_SIDE = {
    Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION,
    Kind.RECV_ACTIVATION: Kind.SEND_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECV_GRADIENT,
    Kind.RECV_GRADIENT: Kind.SEND_GRADIENT,
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers that a rank starts together and waits for together; prints as ``SA0.3+RG0.1``.

    Two ranks that each have something for the other need it: one blocking send after the other
    would leave both waiting for a receive.
    """

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


Entry = Action | Exchange
"""An element of a rank's list."""


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The actions of an element of a list."""
    return entry.actions if isinstance(entry, Exchange) else (entry,)


def parse_action(text: str) -> Action:
    """The action that prints as ``text``; :class:`ScheduleError` if none does."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is no pipeline action: write kind, stage and micro-batch as in F3.1, kind "
            "and stage as in U3 (kinds F B I W SA RA SG RG; U R G take a stage only)"
        )
    kind, stage, micro_batch, marker, marked = match.groups()
    if marker:
        return Action(Kind(marker), int(marked))
    return Action(Kind(kind), int(stage), int(micro_batch))


def parse_list(text: str) -> tuple[Entry, ...]:
    """A rank's list from its text: actions with blanks between, ``+`` within an exchange."""
    entries: list[Entry] = []
    for word in text.split():
        actions = tuple(map(parse_action, word.split("+")))
        if len(actions) > 1 and not all(action.is_transfer for action in actions):
            raise ScheduleError(f"{word!r} joins actions that are not all sends and receives")
        entries.append(actions[0] if len(actions) == 1 else Exchange(actions))
    return tuple(entries)


def format_list(entries: tuple[Entry, ...]) -> str:
    """The text that :func:`parse_list` reads."""
    return " ".join(map(str, entries))
