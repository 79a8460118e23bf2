"""Actions as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroexp.errors import ScheduleError
from zeroexp.pipeline.action import (
    MARKERS,
    Action,
    Exchange,
    Kind,
    format_list,
    parse_action,
    parse_list,
)


@given(st.sampled_from(list(Kind)), st.integers(0, 999), st.integers(0, 9999))
def test_every_action_reads_back(kind: Kind, stage: int, micro_batch: int) -> None:
    action = Action(kind, stage, None if kind in MARKERS else micro_batch)
    assert parse_action(str(action)) == action


def test_text_of_a_list() -> None:
    text = "U1 RA1.0 F1.0 SA1.0+RG1.2 B1.2 G1 R1"
    entries = parse_list(text)
    assert format_list(entries) == text
    assert entries[2] == Action(Kind.FORWARD, 1, 0)
    assert entries[3] == Exchange(
        (Action(Kind.SEND_ACTIVATION, 1, 0), Action(Kind.RECV_GRADIENT, 1, 2))
    )


@pytest.mark.parametrize(
    ("side", "other"), [("SA1.4", "RA2.4"), ("SG2.4", "RG1.4"), ("RA1.0", "SA0.0")]
)
def test_the_two_sides_of_a_transfer(side: str, other: str) -> None:
    assert str(parse_action(side).counterpart) == other
    assert str(parse_action(other).counterpart) == side


@pytest.mark.parametrize("text", ["", "F1", "F1.", "X1.2", "U1.2", "F-1.2", "F1.2.3", "f1.2"])
def test_what_is_no_action_is_quoted(text: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{text}' is no pipeline action"):
        parse_action(text)


def test_an_exchange_is_of_transfers() -> None:
    with pytest.raises(ScheduleError, match="not all sends and receives"):
        parse_list("F0.0 SA0.0+B0.0")
