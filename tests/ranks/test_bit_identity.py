"""Stages 0-3 compute the same thing: the same bits for one value of ``zero.reduce``.

A GPT with a tied head, frozen layers and a weight used outside its module, ten AdamW steps in
fp32. Every row also asserts the bytes of state that are alive, counted without asking the engine,
so that a stage that shards nothing cannot pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from census import bytes_since, live_storages
from formula import state_bytes
from small import (
    STAGES,
    digest,
    furthest,
    micro_batches,
    settings,
    tiny_gpt,
    token_batches,
    weights,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zeroexp.engine import Engine

STEPS, SEQUENCES = 10, 16
CUTS = ("block", "model", "leaf", "blocks.*.up,blocks.*.qkv,norm")
CLIP = 0.5


@dataclass(frozen=True)
class Row:
    """One way to run the same training."""

    stage: int
    prefetch: int = 1
    overlap: bool = True
    unit: str = "block"
    reduce: str = "auto"
    accumulate: int = 1
    clip: float | None = None
    shard_size: int | None = None
    """Ranks that share one copy of the state; the others hold replicas (None: all ranks share)."""

    def settings(self, **more: Any) -> dict[str, Any]:
        keys = asdict(self)
        stage, clip, accumulate = (keys.pop(k) for k in ("stage", "clip", "accumulate"))
        if self.shard_size is None:
            del keys["shard_size"]
        zero = {f"zero_{key}": value for key, value in keys.items()}
        return settings(stage, clip=clip, accumulate=accumulate, **zero, **more)


def adamw(module: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, foreach=True, **options)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)


def train(
    row: Row,
    *,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    make: Any = adamw,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Whole weights (rank 0; empty elsewhere) and byte counts taken before the last step.

    ``counted`` are the bytes of all storages that came into being, ``transient`` what the ledger
    calls buffers that are reused, ``state`` and ``padding`` the ledger's account of the state.
    """
    batches = token_batches(steps, SEQUENCES)
    before = live_storages()
    model = tiny_gpt(dtype)
    compute = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    engine = Engine(model, make(model), row.settings(compute=compute))
    found: dict[str, int] = {}
    for step, batch in enumerate(batches):
        pieces = list(micro_batches(batch, row.accumulate))
        for index, piece in enumerate(pieces):
            loss = engine(*piece)
            engine.backward(loss, last=index == len(pieces) - 1)
        if step == steps - 1:
            del loss, piece, pieces
            ledger = engine.ledger
            found["counted"] = bytes_since(before)
            found["transient"] = ledger.live_bytes("whole") + ledger.live_bytes("workspace")
            found["state"] = sum(sum(tiers.values()) for tiers in ledger.state_bytes().values())
            found["padding"] = ledger.padding_bytes()
        engine.step()
    whole = engine.state_dict()
    engine.close()
    return whole, found


def digests(rows: list[Row]) -> list[tuple[dict[str, str], dict[str, int]]]:
    out = []
    for row in rows:
        whole, found = train(row)
        out.append((digest(whole), found))
    return out


def ddp_digest(fused: bool) -> dict[str, str]:
    model = tiny_gpt()
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model)
    for batch in token_batches(STEPS, SEQUENCES):
        ((tokens, targets),) = micro_batches(batch, 1)
        optimizer.zero_grad()
        wrapped(tokens, targets).backward()
        optimizer.step()
    return digest(weights(model))


def single_process(row: Row, dtype: torch.dtype, make: Any) -> dict[str, Tensor]:
    """The same steps on the whole global batch, in plain torch."""
    model = tiny_gpt(dtype)
    optimizer = make(model)
    for tokens, targets in token_batches(STEPS, SEQUENCES):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        if row.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), row.clip)
        optimizer.step()
    return weights(model)


def sampled(accumulate: int, clip: float | None, reduce: str) -> list[Row]:
    """All stages, each with other depths of prefetch, overlap and cuts; fixed, about pairwise."""
    mixed = itertools.cycle(itertools.product((0, 1, 2), (True, False)))
    start = 3 * accumulate + (clip is not None) + (reduce == "last")
    choices: Iterator[tuple[int, bool]] = itertools.islice(mixed, start, None)
    rows = []
    for position, stage in enumerate((0, 1, 2, 3, 3, 3)):
        prefetch, overlap = next(choices)
        cut = CUTS[(position + start) % len(CUTS)]
        rows.append(Row(stage, prefetch, overlap, cut, reduce, accumulate, clip))
    return rows


def complete(accumulate: int, clip: float | None, reduce: str) -> list[Row]:
    product = itertools.product(STAGES, (0, 1, 2), (True, False), CUTS)
    return [Row(s, p, o, u, reduce, accumulate, clip) for s, p, o, u in product]


def check(ranks: Any, num_ranks: int, rows: list[Row]) -> dict[str, str]:
    """All rows give the same bits and hold the state of their stage; returns the digest."""
    results = ranks(num_ranks)(digests, rows, timeout=60 + 10 * len(rows))
    whole = [result for result, _ in results[0]]
    assert set(whole[0]) == set(tiny_gpt().state_dict())
    for row, bits in zip(rows, whole, strict=True):
        apart = [name for name in bits if bits[name] != whole[0][name]]
        assert not apart, f"{row} differs from {rows[0]} in {apart}"
    model = tiny_gpt()
    for index, row in enumerate(rows):
        apart = row.accumulate > 1 and row.reduce == "each"
        wanted = state_bytes(
            model, row.stage, row.shard_size or num_ranks, row.unit, summed_apart=apart
        )
        found = [result[index][1] for result in results]
        for rank, each in enumerate(found):
            where = f"{row}, rank {rank}"
            assert each["state"] == wanted.total, where
            assert each["counted"] - each["transient"] == wanted.total, where
        padding = sum(each["padding"] for each in found)
        assert num_ranks * wanted.total - padding == round(num_ranks * wanted.ideal), row
    return whole[0]


@pytest.mark.parametrize(
    ("num_ranks", "clip"),
    [(2, None), (2, CLIP), (4, CLIP), pytest.param(4, None, marks=pytest.mark.full)],
)
@pytest.mark.parametrize(("accumulate", "reduce"), [(1, "auto"), (4, "each"), (4, "last")])
def test_same_bits(ranks, num_ranks, clip, accumulate, reduce):
    """deepspeed 3.C 35: stages 0-3 after ten steps, any prefetch depth, overlap and unit cut."""
    check(ranks, num_ranks, sampled(accumulate, clip, reduce))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize(
    ("accumulate", "reduce"), [(1, "each"), (1, "last"), (4, "each"), (4, "last")]
)
def test_same_bits_in_the_whole_matrix(ranks, num_ranks, clip, accumulate, reduce):
    check(ranks, num_ranks, complete(accumulate, clip, reduce))


def test_same_bits_for_every_way_to_reduce_one_micro_batch(ranks):
    """With one micro-batch there is one sum, so each and last do not differ."""
    rows = [Row(stage, reduce=how) for stage in STAGES for how in ("each", "last")]
    check(ranks, 2, rows)


def test_same_bits_for_replicas(ranks):
    """Two replicas of one rank each add two numbers, as two shards do: the bits of stage 0. Two
    groups of two add in another order, the same for every schedule and cut, and within rounding
    of what one group of four computes."""
    pair = Row(3, 0, False, "leaf", clip=CLIP, shard_size=1)
    check(
        ranks, 2, [Row(0, clip=CLIP), pair, replace(pair, prefetch=2, overlap=True, unit="block")]
    )
    four = Row(3, 0, False, "block", "each", 2, CLIP, shard_size=2)
    check(ranks, 4, [four, replace(four, prefetch=2, overlap=True, unit="leaf")])
    ours, one_group = (
        ranks(4)(rounded, row, "adamw64")[0] for row in (four, replace(four, shard_size=None))
    )
    assert furthest(ours, one_group) <= 1e-10


def test_same_bits_as_ddp(ranks):
    """Two ranks, one micro-batch, no clipping, foreach AdamW: torch's DDP to the bit."""
    ours = ranks(2)(digests, [Row(stage) for stage in STAGES])[0]
    theirs = ranks(2)(ddp_digest, False)[0]
    for stage, (bits, _) in zip(STAGES, ours, strict=True):
        assert bits == theirs, f"stage {stage}"


def rounded(row: Row, kind: str) -> dict[str, Tensor]:
    dtype, make = {"adamw64": (torch.float64, adamw), "sgd32": (torch.float32, sgd)}.get(
        kind, (torch.float32, adamw)
    )
    return train(row, dtype=dtype, make=make)[0]


@pytest.mark.parametrize(
    ("kind", "bound"), [("adamw64", 1e-10), ("sgd32", 1e-6), ("adamw32", 1e-6)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_close_to_one_process_with_the_global_batch(ranks, kind, bound, num_ranks):
    """Rounding apart, N ranks with accumulation and clipping equal one process."""
    dtype, make = (
        (torch.float64 if kind == "adamw64" else torch.float32),
        (sgd if kind == "sgd32" else adamw),
    )
    rows = [
        Row(stage, accumulate=accumulate, clip=clip)
        for stage, accumulate, clip in ((0, 1, None), (1, 4, CLIP), (2, 4, None), (3, 1, CLIP))
    ]
    for row in rows:
        whole = ranks(num_ranks)(rounded, row, kind)[0]
        reference = single_process(row, dtype, make)
        gap = furthest({n: whole[n] for n in reference}, reference)
        assert gap <= bound, f"{row} is {gap:.3g} away"
