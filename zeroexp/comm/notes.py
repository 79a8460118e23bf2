"""Small structured facts between ranks, as JSON: nothing that arrives is executed."""

from __future__ import annotations

import json
from typing import Any

import torch

from zeroexp.comm.group import Group


def exchange_notes(group: Group, note: Any, what: str) -> list[Any]:
    """Every rank's ``note`` (anything JSON can hold) on every rank, in rank order."""
    data = json.dumps(note).encode()
    lengths = group.exchange(torch.tensor([len(data)]), what).flatten().tolist()
    payload = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if data:
        payload[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = group.exchange(payload, what)
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
