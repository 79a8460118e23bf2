"""What is on its way while a unit computes: the next unit gathered, those behind it from disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_lab import offloaded
from small import mlp

from zeroexp.engine import Engine
from zeroexp.tiers.python_pool import PythonPool
from zeroexp.zero.unit import Life, UnitState

WIDTHS = (16,) * 8


def near(unit: UnitState) -> bool:
    """Whether its shard is in memory, or on its way there."""
    homes = [s.home for s in unit.segments if s.cut]
    return any(home is not None and home._raw is not None for home in homes)


def seen_at_each_use(folder: str) -> list[tuple[int, list[int], list[int]]]:
    """At each use of a unit in the second forward: its place, the places of units that are whole or
    being gathered, and of those whose shards visit memory."""
    model = mlp(*WIDTHS)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        offloaded(3, folder, offload_kind="nvme_params"),
    )
    found = []

    def step() -> None:
        engine.backward(engine(torch.ones(4, 16)).square().mean())
        engine.step()

    step()
    units = [u for u in engine.model.units if u.transient]

    def record(place: int) -> None:
        gathered = [i for i, u in enumerate(units) if u.life is not Life.SHARDED]
        visiting = [i for i, u in enumerate(units) if u.life is Life.SHARDED and near(u)]
        found.append((place, gathered, visiting))

    for place, unit in enumerate(units):
        unit.module.register_forward_pre_hook(lambda m, args, place=place: record(place))
    engine(torch.ones(4, 16))
    engine.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_disk_for_three_ahead_gather_for_the_next(
    ranks: Any, tmp_path: Path, num_ranks: int
) -> None:
    """ZeRO-Infinity (arXiv:2104.07857, section 6.2): disk for i+3 and i+2, all-gather for i+1."""
    for found in ranks(num_ranks)(seen_at_each_use, str(tmp_path)):
        last = len(found) - 1
        assert [place for place, _, _ in found] == list(range(last + 1))
        for place, gathered, visiting in found:
            assert gathered == [i for i in (place, place + 1) if i <= last]
            assert visiting == [i for i in (place + 2, place + 3) if i <= last]


def test_the_page_cache_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine in Python has no direct transfers."""
    monkeypatch.setattr(
        "zeroexp.tiers.file.make_backend",
        lambda *_: PythonPool("a test", block_size=1 << 20, threads=1),
    )
    model = mlp(*WIDTHS)
    with caplog.at_level(logging.WARNING, logger="zeroexp"):
        engine = Engine(
            model,
            torch.optim.Adam(model.parameters()),
            offloaded(3, str(tmp_path), offload_kind="nvme_params"),
        )
    engine.close()
    (said,) = [r.getMessage() for r in caplog.records if "page cache" in r.getMessage()]
    assert str(tmp_path) in said and "no direct transfers" in said
