"""Resident memory of ranks that build a model which is born sharded, by the kernel's count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeroexp
from zeroexp import ops
from zeroexp.engine import Engine

MIB = 1 << 20
BLOCKS, WIDTH = 24, 1024
UNIT = WIDTH * WIDTH * 4
MODEL = BLOCKS * UNIT
CONFIG = {"zero": {"stage": 3}, "precision": {"compute": "fp32"}}
NOISE = 12 * MIB
"""What interpreter, allocator and gloo may take besides."""


def resident() -> tuple[int, int]:
    """(now, peak since the last reset) in bytes."""
    fields = dict(f.split(":", 1) for f in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(BLOCKS))
    )


def growth() -> tuple[int, int]:
    """Peak growth of building the model, and of building it and an engine over it."""
    with zeroexp.sharded_init(CONFIG):
        nn.Linear(8, 8)
    ops.return_freed_memory()
    before = resident()[0]
    Path("/proc/self/clear_refs").write_text("5")
    with zeroexp.sharded_init(CONFIG):
        module = build()
    built = resident()[1] - before
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), CONFIG)
    adopted = resident()[1] - before
    engine.close(collective=False)
    return built, adopted


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_ever_holds_the_whole_model(ranks, num_ranks):
    """Its share, the block under construction and a flat copy of it; when an engine takes over,
    one unit more, which is whole, flat and cut at once."""
    for built, adopted in ranks(num_ranks)(growth):
        assert built <= MODEL // num_ranks + 2 * UNIT + NOISE
        assert adopted <= MODEL // num_ranks + 4 * UNIT + NOISE
        assert MODEL // num_ranks <= adopted < MODEL
