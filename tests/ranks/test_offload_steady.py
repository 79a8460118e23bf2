"""The steady state allocates nothing, and the ring wastes nothing to speak of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from census import bytes_since, live_storages
from offload_lab import offloaded
from small import micro_batches, mlp

from zeroexp.engine import Engine

WIDTHS = (64, 512, 512, 64)


def held_after_each_step(kind: str, folder: str, steps: int) -> list[tuple[int, int]]:
    """Bytes of all live storages, and of buffers that the ledger says are kept for reuse."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 64, generator=generator), torch.randn(8, 64, generator=generator))
        for _ in range(steps)
    ]
    before = live_storages()
    model = mlp(*WIDTHS)
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        offloaded(3, folder, offload_kind=kind),
    )
    found = []
    for batch in batches:
        x, y = next(iter(micro_batches(batch, 1)))
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        del loss, x, y
        found.append((bytes_since(before), engine.ledger.live_bytes("workspace")))
    if engine.disk is not None:
        engine.disk.flush()
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["cpu", "nvme", "nvme_params"])
def test_nothing_is_allocated_after_the_second_step(ranks: Any, tmp_path: Any, kind: str) -> None:
    for found in ranks(2)(held_after_each_step, kind, str(tmp_path), 6):
        assert len(set(found[2:])) == 1, found


def ring_and_state(folder: str) -> tuple[int, int, int]:
    """Bytes of the ring's slots, of the largest record, and of all records, for 1M elements."""
    model = mlp(512, 1024, 512)
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        offloaded(3, folder, offload_kind="nvme", offload_chunk="1MiB"),
    )
    assert engine.disk is not None
    (ring,) = engine.disk.rings
    records = [
        n
        for s in engine.model.segments
        if s.on_disk and s.on_disk.optim
        for n in s.on_disk.optim.record_bytes
    ]
    engine.close()
    return ring.slot_bytes, max(records), sum(records)


def test_records_fill_the_slots_and_carry_little_beside_the_state(
    ranks: Any, tmp_path: Any
) -> None:
    """12 bytes of each element: master copy and two moments in fp32."""
    elements = 512 * 1024 + 1024 + 1024 * 512 + 512
    for slot, largest, total in ranks(1)(ring_and_state, str(tmp_path)):
        assert largest <= 1 << 20
        assert slot - largest <= 0.02 * largest
        assert 12 * elements <= total <= 12 * elements * 1.02
