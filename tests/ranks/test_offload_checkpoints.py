"""Checkpoints know no tier: saved from any kind, loaded into any other, the run goes on bit for
bit (case NV-08)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from offload_lab import KINDS, offloaded, train
from small import STAGES, digest, mlp, regression

from zeroexp.engine import Engine

WIDTHS = (40, 160, 120, 3)
PLACES = [(stage, kind) for stage in STAGES for kind in ("none", *KINDS)]
Place = tuple[int, str]


def engine_at(place: Place, folder: str, compute: str, seed: int) -> Engine:
    stage, kind = place
    module = mlp(*WIDTHS, seed=seed)
    biases = [p for p in module.parameters() if p.dim() == 1]
    matrices = [p for p in module.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return Engine(module, optimizer, offloaded(stage, folder, offload_kind=kind, compute=compute))


def carried(pairs: list[tuple[Place, Place]], folder: str, compute: str) -> list[list[str]]:
    """For each pair: names of the weights that differ from those of a run in one go."""
    data = regression(4, 8, WIDTHS[0], WIDTHS[-1])
    straight = engine_at((0, "none"), folder, compute, 3)
    train(straight, data)
    wanted = digest(straight.state_dict())
    straight.close()
    saved: dict[Place, Path] = {}
    for place in dict.fromkeys(a for a, _ in pairs):
        engine = engine_at(place, folder, compute, 3)
        train(engine, data[:2])
        saved[place] = Path(folder) / f"saved-{place[0]}-{place[1]}"
        engine.save_checkpoint(saved[place])
        train(engine, data[2:3])  # saving changes nothing, and this is not in the checkpoint
        engine.close()
    out = []
    for before, after in pairs:
        engine = engine_at(after, folder, compute, 8)
        train(engine, data[:1])
        engine.load_checkpoint(saved[before])
        train(engine, data[2:])
        found = digest(engine.state_dict())
        engine.close()
        out.append([name for name in wanted if found.get(name) != wanted[name]])
    return out


def check(ranks, num_ranks: int, pairs: list[tuple[Place, Place]], folder: Path, how: str) -> None:
    results = ranks(num_ranks)(carried, pairs, str(folder), how, timeout=60 + 4 * len(pairs))
    wrong = {pair: names for pair, names in zip(pairs, results[0], strict=True) if names}
    assert not wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_from_one_placement_to_another(ranks, tmp_path, num_ranks):
    """Every placement is saved from and loaded into once."""
    pairs = [(PLACES[i], PLACES[(7 * i + 3) % len(PLACES)]) for i in range(len(PLACES))]
    check(ranks, num_ranks, pairs, tmp_path, "bf16" if num_ranks == 1 else "fp32")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_from_every_placement_to_every_other(ranks, tmp_path, num_ranks, compute):
    check(ranks, num_ranks, list(itertools.product(PLACES, PLACES)), tmp_path, compute)
