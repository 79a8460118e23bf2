"""The plan of a pipeline against what its ledger counts: state, traffic and transfers to the byte,
and the micro-batches that are alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import rank, settings
from torch import Tensor, nn

from zeroexp.config import Config
from zeroexp.models.build import build
from zeroexp.models.loss import next_token_loss
from zeroexp.models.specs import layer_shapes, param_specs
from zeroexp.moe import auxiliary_loss
from zeroexp.optim import build as build_optimizer
from zeroexp.pipe_engine import PipeEngine
from zeroexp.plan import Prediction, predict

SPREAD = {"kind": "top1", "experts": 4, "expert_parallel": 2}
MODEL = {"kind": "gpt", "dim": 16, "layers": 4, "heads": 2, "vocab_size": 37}


def configured(case: dict[str, Any], num_ranks: int) -> Config:
    keys = dict(case)
    pipeline = {"schedule": keys.pop("schedule"), "stages": 2, "micro_batches": 4}
    pipeline |= keys.pop("pipeline", {})
    model = MODEL | keys.pop("model", {})
    moe = keys.pop("moe", {"kind": "none"})
    stage, batch = keys.pop("stage"), 8 * num_ranks // 2 * keys.get("accumulate", 1)
    return Config.from_mapping(
        {
            **settings(stage, devices=num_ranks, **keys),
            "pipeline": pipeline,
            "model": model,
            "moe": moe,
            "data": {"batch_size": batch, "seq_len": 8},
        }
    )


def planned(config: Config) -> Prediction:
    specs = param_specs(config.model, config.moe)
    return predict(config, specs, layer_shapes(config.model, config.moe))


def what_happens(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        config = configured(case, torch.distributed.get_world_size())
        model = build(config.model, config.moe, seed=0, recompute=False)
        optimizer = build_optimizer(config.optim, model.named_parameters())

        def loss(output: Tensor, target: Tensor, model: nn.Module = model) -> Tensor:
            return next_token_loss(output, target) + auxiliary_loss(model)

        engine = PipeEngine(model, optimizer, config, loss=loss)
        tokens = torch.randint(37, (8, 8), generator=torch.Generator().manual_seed(rank() % 2))
        state = {}
        for _ in range(2):
            for _ in range(config.trainer.accumulate_grad_batches):
                engine.train_batch(tokens, tokens)
            state = engine.ledger.state_bytes()
            engine.step()
        sent = {k: n for k, n in engine.ledger.comm_bytes_per_step().items() if k != "control"}
        found.append(
            {
                "state": state,
                "sent": {op: n for op, n in sent.items() if n},
                "moved": {k: n for k, n in engine.ledger.transfer_bytes_per_step().items() if n},
                "alive": [s.peak_in_flight for s in engine.executor.stages.values()],
            }
        )
        engine.close()
    return found


CASES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "stage": 1},
    {"schedule": "1f1b", "stage": 2, "accumulate": 2},
    {"schedule": "zb_v", "stage": 3},
    {"schedule": "interleaved", "stage": 3, "zero_reduce": "last"},
    {"schedule": "interleaved", "stage": 3, "pipeline": {"whole_stages": 2}, "accumulate": 2},
    {"schedule": "zb_h1", "stage": 0, "model": {"tied": False}},
    {"schedule": "zb_v", "stage": 1, "zero_reduce": "each"},
    {"schedule": "breadth_first", "stage": 3, "offload_kind": "cpu_params"},
    {"schedule": "1f1b", "stage": 2, "offload_kind": "cpu", "compute": "bf16"},
    {"schedule": "interleaved", "stage": 3, "moe": {"kind": "top2", "experts": 4, "every": 2}},
    {"schedule": "1f1b", "stage": 2, "moe": SPREAD | {"balance_loss": 0, "shared": 1}},
    {"schedule": "zb_v", "stage": 1, "moe": SPREAD | {"z_loss": 0.1}, "compute": "bf16"},
]


def check(cases: list[dict[str, Any]], results: list[Any], num_ranks: int) -> None:
    for number, case in enumerate(cases):
        plan = planned(configured(case, num_ranks))
        for at, each in enumerate(results):
            found = each[number]
            assert found["state"] == plan.state_bytes[at], (case, at)
            sent, wanted = dict(found["sent"]), dict(plan.comm_bytes_per_step[at])
            # Where tokens go the gates decide: whole rows, in forward and back in backward.
            rows, even = sent.pop("all_to_all", 0), wanted.pop("all_to_all", 0)
            width = MODEL["dim"] * (2 if case.get("compute") == "bf16" else 4)
            assert rows % (2 * width) == 0 and 0.2 * even <= rows <= 2 * even, (case, at)
            assert sent == wanted, (case, at)
            assert found["moved"] == plan.transfer_bytes_per_step[at], (case, at)
            assert plan.pipeline is not None
            alive = plan.pipeline.simulation.peak_in_flight[plan.pipeline.place(at)]
            assert max(found["alive"]) <= alive <= sum(found["alive"]), (case, at)


def test_state_and_traffic_are_those_of_the_plan(ranks):
    check(CASES, ranks(4)(what_happens, CASES), 4)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_every_stage_and_kind_of_offload(ranks, schedule):
    cases: list[dict[str, Any]] = [
        {"schedule": schedule, "stage": stage, "offload_kind": kind, "zero_reduce": reduce}
        for stage in range(4)
        for kind in ("none", "cpu", *(("cpu_params",) if stage == 3 else ()))
        for reduce in ("each", "last")
    ]
    check(cases, ranks(4)(what_happens, cases, timeout=240), 4)
