"""Every stage against torch's DistributedDataParallel on the same ranks and batches."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small import STAGES, furthest, micro_batches, settings, tiny_gpt, token_batches, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroexp.engine import Engine

STEPS, SEQUENCES, CLIP = 3, 16, 0.5
KINDS = {
    "AdamW in fp64": (torch.float64, torch.optim.AdamW, {"lr": 1e-2}, 1e-10),
    "SGD in fp32": (torch.float32, torch.optim.SGD, {"lr": 0.05}, 1e-6),
    "AdamW in fp32": (torch.float32, torch.optim.AdamW, {"lr": 1e-2}, 1e-6),
}
"""dtype, optimizer, options, bound on the distance. The attention has no key bias: its gradient is
zero but for rounding, which AdamW would blow up to steps of full size."""


def built(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    dtype, make, options, _ = KINDS[kind]
    model = tiny_gpt(dtype, layers=2)
    optimizer: Any = make([p for p in model.parameters() if p.requires_grad], **options)
    return model, optimizer


def by_ddp(kind: str, accumulate: int, clip: float | None) -> dict[str, Tensor]:
    model, optimizer = built(kind)
    wrapped = DistributedDataParallel(model)
    for batch in token_batches(STEPS, SEQUENCES):
        optimizer.zero_grad()
        for index, piece in enumerate(micro_batches(batch, accumulate)):
            with wrapped.no_sync() if index < accumulate - 1 else nullcontext():
                (wrapped(*piece) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def by_engine(kind: str, accumulate: int, clip: float | None, stage: int) -> dict[str, Tensor]:
    model, optimizer = built(kind)
    compute = "fp64" if KINDS[kind][0] == torch.float64 else "fp32"
    keys = settings(stage, accumulate=accumulate, clip=clip, compute=compute)
    engine = Engine(model, optimizer, keys)
    for batch in token_batches(STEPS, SEQUENCES):
        for piece in micro_batches(batch, accumulate):
            engine.backward(engine(*piece))
            engine.step()
    whole = engine.state_dict()
    engine.close()
    return whole


def distances(kind: str) -> tuple[dict[tuple[int, bool, int], float], float, float]:
    """By accumulation, clipping and stage (rank 0); how far training moved; what clipping did."""
    found = {}
    ends: dict[tuple[int, bool], dict[str, Tensor]] = {}
    for accumulate, clip in itertools.product((1, 4), (None, CLIP)):
        wanted = ends[accumulate, clip is not None] = by_ddp(kind, accumulate, clip)
        for stage in STAGES:
            whole = by_engine(kind, accumulate, clip, stage)
            if whole:
                mine = {name: whole[name] for name in wanted}
                found[accumulate, clip is not None, stage] = furthest(mine, wanted)
    start = weights(built(kind)[0])
    return found, furthest(ends[1, False], start), furthest(ends[1, False], ends[1, True])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_stage_trains_what_ddp_trains(ranks, num_ranks):
    """deepspeed 3.C 35: accumulation 1 and 4, clipped or not, stages 0-3."""
    for kind, (*_, bound) in KINDS.items():
        found, moved, clipped = ranks(num_ranks)(distances, kind, timeout=120)[0]
        assert len(found) == 16
        apart = {row: gap for row, gap in found.items() if not gap <= bound}
        assert not apart, f"{kind}: {apart}"
        assert moved > 1e3 * bound and clipped > 1e2 * bound, f"{kind} proves nothing"
