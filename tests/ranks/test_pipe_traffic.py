"""What a pipeline holds and sends, by planner and formula, and its bits in half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pipe_models import Trial
from pipe_zero_lab import Case, reference, train_all
from pipeline_lab import SCHEDULES
from small import STAGES, digest, furthest
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.config import Config
from zeroexp.models.build import build
from zeroexp.models.loss import next_token_loss
from zeroexp.models.specs import layer_shapes, param_specs
from zeroexp.pipe_engine import PipeEngine
from zeroexp.pipeline.residency import num_unshards, with_residency
from zeroexp.pipeline.schedules import make_schedule
from zeroexp.plan import predict

GPT = {"vocab_size": 24, "dim": 16, "layers": 5, "heads": 2}
SEQ, MICRO_BATCHES = 8, 4


def planned(schedule: str, stage: int, **keys: Any) -> Config:
    """Two stages on four ranks, one sequence per micro-batch, one optimizer group."""
    return Config.from_mapping(
        {
            "pipeline": {
                "schedule": schedule,
                "stages": 2,
                "micro_batches": MICRO_BATCHES,
                "virtual": SCHEDULES[schedule],
                **keys,
            },
            "trainer": {"devices": 4, "gradient_clip_val": None},
            "zero": {"stage": stage},
            "precision": {"compute": "fp32"},
            "model": GPT,
            "data": {"batch_size": 2 * MICRO_BATCHES, "seq_len": SEQ},
            "optim.decay_norm_and_bias": True,
        }
    )


def what_happens(config: Config) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(config.model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = PipeEngine(model, optimizer, config, loss=next_token_loss)
    tokens = torch.randint(0, 24, (MICRO_BATCHES, SEQ + 1))
    found: dict[str, Any] = {}
    for _ in range(2):
        engine.train_batch(tokens[:, :-1], tokens[:, 1:])
        found["state"] = engine.ledger.state_bytes()
        engine.step()
    comm = engine.ledger.comm_bytes_per_step()
    in_flight = [s.peak_in_flight for s in engine.executor.stages.values()]
    engine.close()
    return {**found, "comm": comm, "in_flight": in_flight}


def check(ranks: Any, schedule: str, stage: int, **keys: Any) -> None:
    config = planned(schedule, stage, **keys)
    plan = predict(config, param_specs(config.model), layer_shapes(config.model))
    for place, found in enumerate(ranks(4)(what_happens, config)):
        assert found["state"] == plan.state_bytes[place], (schedule, stage, place)
        sent, wanted = found["comm"], plan.comm_bytes_per_step[place]
        assert sent["send"] == wanted["send"], (schedule, stage, place)
        # The ends of a V lie on one rank: the embedding's unit is gathered with each, not once.
        if not (stage == 3 and schedule in ("zb_v", "dualpipe_v")):
            assert sent.get("all_gather", 0) == wanted.get("all_gather", 0), (
                schedule,
                stage,
                place,
            )
        if schedule == "1f1b":  # papers.md 1.6: min(m, p - r) at rank r
            assert found["in_flight"] == [min(MICRO_BATCHES, 2 - place // 2)]


def test_the_plan_is_what_happens_in_a_pipe(ranks):
    check(ranks, "1f1b", 3)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_plan_is_what_happens_in_every_pipe(ranks, schedule, stage):
    check(ranks, schedule, stage)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["interleaved", "breadth_first", "zb_v"])
def test_the_plan_is_what_happens_with_two_whole_stages(ranks, schedule):
    check(ranks, schedule, 3, whole_stages=2)


def even() -> nn.Module:
    """Six layers of 64 elements, fp64: each a stage of 512 bytes."""
    return nn.Sequential(*(nn.Linear(8, 8, bias=False).double() for _ in range(6)))


def gathers(schedule: str, whole: int) -> int:
    model = even()
    trial = Trial(
        "mlp", schedule, 3, 4, pipeline={"virtual": 3, "whole_stages": whole, "cut": "layers"}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PipeEngine(model, optimizer, trial.config(), loss=F.mse_loss)
    x = torch.ones(4, 8, dtype=torch.float64)
    for _ in range(2):
        engine.train_batch(x, x)
        engine.step()
    sent = engine.ledger.comm_bytes_per_step()["all_gather"]
    engine.close()
    return sent


@pytest.mark.full
@pytest.mark.parametrize("whole", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["interleaved", "breadth_first"])
def test_gathers_are_unshards_times_bytes(ranks, schedule, whole):
    """Of two data ranks each sends its half of a stage, 256 bytes, in every gather."""
    marked = with_residency(make_schedule(schedule, 2, 4, 3), whole)
    for at, sent in enumerate(ranks(4)(gathers, schedule, whole)):
        assert sent == num_unshards(marked, at // 2) * 256


# -- half precision --------------------------------------------------------------------------------


def float_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def halves(name: str, compute: str) -> list[Case]:
    keys = {"compute": compute, **({"scale_init": 1024.0} if compute == "fp16" else {})}
    case = Case(name, 0, torch.float32, loss=float_loss, keys=keys)
    return [replace(case, stage=stage) for stage in STAGES]


def check_halves(name: str, cases: list[Case], results: list[list[Any]], bits: int) -> None:
    """The same bits at every stage; beside fp32 in one process, what a mantissa of ``bits`` bits
    loses: each of some 20 roundings on the way of a gradient is off by 2^-bits at most, so the
    weights are off by less than 20 x 2^-bits of the way they went."""
    found = [[each[n] for each in results] for n in range(len(cases))]
    first = digest(found[0][0].state), found[0][0].losses
    for each in found[1:]:
        assert (digest(each[0].state), each[0].losses) == first, name
    plain = replace(cases[0], keys={})
    losses, weights = reference(plain, 2)
    start = {n: p.detach() for n, p in plain.build().named_parameters()}
    way = furthest(weights, start)
    assert 0 < furthest(found[0][0].state, weights) <= 20 * 2.0**-bits * way
    mean = [(a + b) / 2 for a, b in zip(found[0][0].losses, found[0][1].losses, strict=True)]
    assert mean == pytest.approx(losses, rel=20 * 2.0**-bits)


@pytest.mark.parametrize(("compute", "bits"), [("bf16", 8)])
def test_stages_have_the_same_bits_in_half_precision(ranks, compute, bits):
    cases = halves("1f1b", compute)
    check_halves("1f1b", cases, ranks(4)(train_all, cases), bits)


@pytest.mark.full
@pytest.mark.parametrize(("compute", "bits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_in_half_precision(ranks, name, compute, bits):
    cases = halves(name, compute)
    check_halves(name, cases, ranks(4)(train_all, cases, timeout=240), bits)
