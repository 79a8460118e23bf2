"""Pages that go back to the system from the middle of a tensor."""

from __future__ import annotations

import mmap

import pytest
import torch

from zeroexp.ops import HostRange
from zeroexp.ops.pages import release_pages

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 1), (100, PAGE + 3)])
def test_whole_pages_go_and_both_ends_stay(before: int, after: int) -> None:
    held = HostRange(16 * PAGE)
    whole = held.tensor(torch.uint8).fill_(7)
    part = whole[before : 16 * PAGE - after]
    first, last = -(-before // PAGE), (16 * PAGE - after) // PAGE
    assert release_pages(part) == (last - first) * PAGE
    if held.resident_bytes is not None:
        assert held.resident_bytes == (16 - (last - first)) * PAGE
    assert not whole[first * PAGE : last * PAGE].any()
    assert (whole[: first * PAGE] == 7).all() and (whole[last * PAGE :] == 7).all()
    part.fill_(3)
    assert (part == 3).all()


def test_what_is_smaller_than_a_page_stays() -> None:
    tensor = torch.full((5,), 2.0)
    assert release_pages(tensor) == 0
    assert tensor.tolist() == [2.0] * 5
