"""Checkpoint calls that used to fail silently or hang: cases reported against other systems."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from small import STAGES, caught, furthest, mlp, rank, regression, settings, sgd_engine
from torch.nn import functional as F

from zeroexp.engine import Engine


def reload(stage: int, root: str) -> dict[str, Any]:
    module = mlp(4, 5, 2)
    engine = Engine(module, torch.optim.AdamW(module.parameters(), lr=0.01), settings(stage))
    saved = []
    for i, (x, y) in enumerate(regression(2, 4, 4, 2)):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        engine.save_checkpoint(f"{root}/t{i + 1}")
        saved.append(engine.state_dict())
    error = caught(engine.load_checkpoint, f"{root}/nowhere")
    engine.load_checkpoint(f"{root}/t1")
    return {"error": error, "saved": saved, "loaded": engine.state_dict()}


@pytest.mark.parametrize("stage", STAGES)
def test_op08_the_checkpoint_that_was_asked_for_or_an_error(ranks, stage, tmp_path):
    """OP-08: a missing folder is an error with its path on every rank; t1 is t1, not the latest."""
    found = ranks(2)(reload, stage, str(tmp_path))
    for each in found:
        assert each["error"][0] in ("CheckpointError", "FileNotFoundError")
        assert str(tmp_path / "nowhere") in each["error"][1]
    assert furthest(found[0]["loaded"], found[0]["saved"][0]) == 0
    assert furthest(found[0]["loaded"], found[0]["saved"][1]) > 0


def save_alone(stage: int, folder: str) -> tuple[tuple[str, str], float]:
    engine = sgd_engine(mlp(4, 5, 2), stage, timeout=4.0)
    started = time.monotonic()
    if rank() == 0:
        error = caught(engine.save_checkpoint, folder)
    else:
        error = caught(lambda: engine.backward(engine(torch.ones(1, 4)).sum()))
        if not error[0]:
            error = caught(engine.step)
    return error, time.monotonic() - started


@pytest.mark.parametrize("stage", STAGES)
def test_op10_saving_on_one_rank_ends_with_an_error(ranks, stage, tmp_path):
    """OP-10: rank 0 saves, rank 1 trains on: an error on both, well under 30 s, that says why."""
    found = ranks(2)(save_alone, stage, str(tmp_path / "c"), timeout=40)
    assert all(took < 30 for _, took in found)
    assert all(error[0] in ("CollectiveTimeout", "RankMismatch") for error, _ in found), found
    assert any("every rank" in error[1].lower() for error, _ in found)
