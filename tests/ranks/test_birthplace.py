"""Models that are built on disk, because their parameters live there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_host_memory import BLOCKS, MIB, MODEL, NOISE, UNIT, build, resident
from torch import nn

import zeroexp
from zeroexp import ops
from zeroexp.engine import Engine

RING = 40 * MIB
"""Four chunks of optimizer state, and what reads and writes them."""


def config(folder: str) -> dict[str, Any]:
    return {
        "zero": {"stage": 3},
        "precision": {"compute": "fp32"},
        "offload": "nvme_params",
        "offload.nvme.dir": folder,
    }


def on_disk(folder: str) -> int:
    """Bytes of the files below ``folder``, as the disk counts them."""
    return sum(512 * p.stat().st_blocks for p in Path(folder).rglob("*.swap"))


def growth(folder: str) -> tuple[int, int]:
    """Peak growth of building the model, and of building it and an engine over it."""
    with zeroexp.sharded_init(config(folder)):
        nn.Linear(8, 8)
    ops.return_freed_memory()
    before = resident()[0]
    Path("/proc/self/clear_refs").write_text("5")
    with zeroexp.sharded_init(config(folder)):
        module = build()
    built = resident()[1] - before
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), config(folder))
    adopted = resident()[1] - before
    engine.close(collective=False)
    return built, adopted


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_does_not_grow_with_the_model(ranks, tmp_path, num_ranks):
    """The block under construction, a flat copy of it and its shard; when an engine takes over,
    one unit more, which is whole, flat and cut at once."""
    for built, adopted in ranks(num_ranks)(growth, str(tmp_path)):
        assert built <= 3 * UNIT + NOISE < MODEL // 2
        assert adopted <= 6 * UNIT + RING + NOISE
        assert adopted < MODEL


def weights_and_files(folder: str) -> tuple[dict[str, torch.Tensor], int, int]:
    def made() -> nn.Module:
        torch.manual_seed(7)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(4)))
        with torch.no_grad():
            for parameter in model.parameters():  # initialisation over the finished model
                parameter.add_(1.0)
        return model

    plain = made()
    with zeroexp.sharded_init(config(folder)):
        model = made()
    born = len(list(Path(folder).glob("*birth*")))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config(folder))
    left = len(list(Path(folder).glob("*birth*")))
    state = engine.state_dict()
    engine.close(collective=False)
    differs = {k: v - state[k] for k, v in plain.state_dict().items()} if state else {}
    return differs, born, left


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_are_those_of_a_plain_build_and_the_files_go(ranks, tmp_path, num_ranks):
    for differs, _, left in ranks(num_ranks)(weights_and_files, str(tmp_path)):
        assert all(not difference.any() for difference in differs.values())
        assert left == 0


def transient(folder: str) -> tuple[int, int]:
    """Bytes on the disk when the model is built, and when an engine has it."""
    with zeroexp.sharded_init(config(folder)):
        module = build()
    born = on_disk(folder)
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), config(folder))
    held = on_disk(folder)
    engine.close(collective=False)
    return born, held


def test_the_disk_holds_the_parameters_once_before_and_after(ranks, tmp_path):
    ((born, held),) = ranks(1)(transient, str(tmp_path))
    assert MODEL <= born <= MODEL + BLOCKS * 4096
    # parameter, gradient, and the copy that is stepped
    assert 3 * MODEL <= held <= 3 * MODEL + BLOCKS * 3 * 4096 * 4
