"""Bytes sent per rank and step: 2(N-1)/N and 3(N-1)/N of the model, counted three ways.

Calls of torch.distributed are counted by wrapping them, the wire by the kernel's counter of bytes
written by the process, and both are held against the formula, the ledger and the plan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from census import counted_calls, wire_bytes
from formula import sizes, traffic_bytes
from small import STAGES, mlp, settings, world
from torch import nn

from zeroexp.engine import Engine

WIDTHS = (64, 200, 150, 200, 8)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return mlp(*WIDTHS, dtype=dtype)


def one_step(engine: Engine, micro_batches: int, x: torch.Tensor) -> None:
    for index in range(micro_batches):
        loss = engine(x).square().mean()
        engine.backward(loss, last=index == micro_batches - 1)
    engine.step()


def sent(keys: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """What the third step sends (the first two record the order of units)."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(model, optimizer, settings(accumulate=micro_batches, **keys))
    x = torch.ones(4, WIDTHS[0])
    for _ in range(2):
        one_step(engine, micro_batches, x)
    before, wire = engine.ledger.comm_bytes(), wire_bytes()
    with counted_calls() as traffic:
        one_step(engine, micro_batches, x)
    wire = wire_bytes() - wire
    after = engine.ledger.comm_bytes()
    found = {
        "calls": traffic.total,
        "control": traffic.control,
        "wire": wire,
        "count": sum(traffic.calls.values()),
        "ledger": {op: after[op] - before.get(op, 0) for op in after},
        "step": engine.ledger.comm_bytes_per_step(),
    }
    engine.close()
    return found


def check(results: list[dict[str, Any]], wanted: dict[str, int]) -> None:
    for rank, found in enumerate(results):
        total = sum(wanted.values())
        assert found["calls"] == total, f"rank {rank}: {found}, wanted {wanted}"
        ledger = {op: n for op, n in found["ledger"].items() if op != "control" and n}
        assert ledger == {op: n for op, n in wanted.items() if n}, f"rank {rank}"
        assert found["step"] == ledger, f"rank {rank}"
        assert found["control"] <= 4096
        # Headers: gloo adds less than 128 bytes to a message; a printed line may be in it, too.
        allowed = total + found["control"] + 256 * (found["count"] + 64)
        assert total <= found["wire"] <= allowed, f"rank {rank}: {found['wire']} bytes for {total}"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_volume_of_a_step(ranks, stage, num_ranks):
    model = model_of()
    wanted = traffic_bytes(model, stage, num_ranks)
    padded = sizes(model, num_ranks, trainable=True).padded * 4
    factor = 3 if stage == 3 else 2
    assert sum(wanted.values()) == factor * (num_ranks - 1) * padded // num_ranks
    check(ranks(num_ranks)(sent, {"stage": stage}, 1), wanted)


@pytest.mark.parametrize("reduce", ["auto", "each", "last"])
@pytest.mark.parametrize("stage", STAGES)
def test_volume_with_accumulation(ranks, stage, reduce):
    """``each`` reduces every micro-batch, ``last`` once; stage 3 gathers for every micro-batch."""
    wanted = traffic_bytes(model_of(), stage, 2, micro_batches=4, reduce=reduce)
    check(ranks(2)(sent, {"stage": stage, "zero_reduce": reduce}, 4), wanted)


@pytest.mark.parametrize("reshard", ["true", "auto", "false"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_volume_when_parameters_are_kept_for_backward(ranks, reshard, micro_batches):
    """``reshard_after_forward=false`` saves the second gather: two model volumes, not three."""
    keys = {"stage": 3, "zero_reshard_after_forward": reshard}
    wanted = traffic_bytes(model_of(), 3, 2, micro_batches=micro_batches, reshard=reshard)
    check(ranks(2)(sent, keys, micro_batches), wanted)


@pytest.mark.parametrize("cut", ["model", "leaf", "0,4"])
def test_volume_does_not_depend_on_the_cut(ranks, cut):
    wanted = traffic_bytes(model_of(), 3, 2, cut)
    check(ranks(2)(sent, {"stage": 3, "zero_unit": cut}, 1), wanted)


@pytest.mark.parametrize(
    "keys",
    [{"zero_prefetch": 0}, {"zero_prefetch": 3}, {"zero_overlap": False}, {"zero_bucket": 4096}],
)
def test_volume_does_not_depend_on_the_schedule(ranks, keys):
    for stage in (1, 3):
        wanted = traffic_bytes(model_of(), stage, 2)
        check(ranks(2)(sent, {"stage": stage, **keys}, 1), wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_volume_in_bf16(ranks, stage):
    """Parameters travel in bf16, gradients in ``precision.reduce`` (fp32 unless said otherwise)."""
    for reduce, wire in (("auto", 4), ("bf16", 2)):
        keys = {"stage": stage, "compute": "bf16", "precision_reduce": reduce}
        wanted = traffic_bytes(model_of(), stage, 2, param_size=2, wire_size=wire)
        if stage == 0:  # reduced gradients are gathered as they are summed: in fp32
            wanted["all_gather"] = traffic_bytes(model_of(), 0, 2)["all_gather"]
        check(ranks(2)(sent, keys, 1), wanted)


def evaluation(stage: int) -> int:
    model = model_of()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), settings(stage))
    x = torch.ones(4, WIDTHS[0])
    one_step(engine, 1, x)
    with counted_calls() as traffic, torch.no_grad():
        engine(x)
    engine.close()
    return traffic.total * world() // (world() - 1)


def test_evaluation_gathers_once_at_stage_3_and_sends_nothing_below(ranks):
    padded = sizes(model_of(), 2, trainable=True).padded * 4
    for stage in STAGES:
        assert ranks(2)(evaluation, stage) == [padded if stage == 3 else 0] * 2
