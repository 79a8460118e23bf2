"""``zero.bucket``, ``zero.prefetch`` and ``zero.overlap``: what each of them changes, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from census import counted_calls
from small import settings
from torch import nn

from zeroexp import Engine

LAYERS, WIDTH = 6, 32


def messages(bucket: int) -> dict[str, int]:
    """Sending calls of one step of one unit of 64 x 64 float32 at stage 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        settings(2, zero_bucket=bucket, zero_unit="model"),
    )
    with counted_calls() as traffic:
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
    engine.close()
    return dict(traffic.calls)


@pytest.mark.parametrize("cuts", [2, 4])
def test_a_reduction_is_cut_into_messages_of_the_bucket(ranks: Any, cuts: int) -> None:
    """16 KiB of gradients for two ranks: a bucket of 16 KiB / cuts makes that many messages."""
    for one, many in zip(ranks(2)(messages, 16384), ranks(2)(messages, 16384 // cuts), strict=True):
        assert sum(many.values()) - sum(one.values()) == cuts - 1


def held(prefetch: int, overlap: bool) -> int:
    """Peak bytes of whole units in a step at stage 3, once the order of units is known."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        settings(3, zero_prefetch=prefetch, zero_overlap=overlap, zero_unit="leaf"),
    )
    for _ in range(3):
        engine.ledger.reset_peaks()
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        engine.step()
    found = engine.ledger.peak_bytes("whole")
    engine.close()
    return found


UNIT_BYTES = 4 * WIDTH * WIDTH


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_is_the_number_of_whole_units_beside_the_one_in_use(
    ranks: Any, prefetch: int
) -> None:
    assert ranks(2)(held, prefetch, True) == [UNIT_BYTES * (1 + prefetch)] * 2


def test_without_overlap_one_unit_is_whole_at_a_time(ranks: Any) -> None:
    assert ranks(2)(held, 3, False) == [UNIT_BYTES] * 2
