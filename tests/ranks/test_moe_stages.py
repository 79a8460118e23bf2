"""Experts under ZeRO: the same weights at every stage and on every tier, and the bytes of each row.

All experts are on every rank, where nothing else is said; to the engine their weights are
parameters like others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from census import bytes_since, live_storages
from formula import state_bytes
from small import STAGES, digest
from torch import nn

from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.models.build import build
from zeroexp.models.specs import param_specs
from zeroexp.moe import auxiliary_loss, read_statistics
from zeroexp.optim.build import build as build_optimizer
from zeroexp.plan import predict

RANKS, STEPS = 2, 4
KEYS: dict[str, Any] = {
    "model": {"dim": 16, "layers": 2, "heads": 2, "vocab_size": 32, "hidden": 24, "bias": True},
    "precision.compute": "fp32",
    "trainer": {"devices": RANKS, "accelerator": "cpu", "gradient_clip_val": 0.5},
    "data.batch_size": 4,
    # reduce=each at all stages: sums of micro-batches in one order
    "zero.reduce": "each",
}
KINDS: dict[str, dict[str, Any]] = {
    "top2": {"moe": {"kind": "top2", "experts": 4, "capacity_factor": 1.0, "jitter": 0.1}},
    "biased": {
        "moe": {
            "kind": "sigmoid",
            "experts": 6,
            "top_k": 2,
            "shared": 1,
            "balance_loss": 0.0,
            "bias_rate": 0.01,
        },
        "trainer.accumulate_grad_batches": 2,
    },
}


def model_of(config: Config) -> nn.Module:
    return build(config.model, config.moe, seed=0)


def train(keys: dict[str, Any]) -> dict[str, Any]:
    config = Config.from_mapping({**KEYS, **keys})
    micro = config.trainer.accumulate_grad_batches
    rank = torch.distributed.get_rank()
    draw = torch.Generator().manual_seed(rank)
    before = live_storages()
    model = model_of(config)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    found: dict[str, Any] = {}
    torch.manual_seed(5)
    for step in range(STEPS):
        for _ in range(micro):
            tokens = torch.randint(0, 32, (2, 8), generator=draw)
            loss = engine(tokens, tokens) + auxiliary_loss(model)
            engine.backward(loss)
            del loss, tokens
        if step == STEPS - 1:
            statistics = read_statistics(model)
            ledger = engine.ledger
            held = ledger.live_bytes("whole") + ledger.live_bytes("workspace")
            found["counted"] = bytes_since(before) - held
            found["state"] = ledger.state_bytes()
        engine.step()
    found["buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    found["routed"] = [sum(numbers.tokens_per_expert) for numbers in statistics.values()]
    found["weights"] = digest(engine.state_dict())
    engine.close()
    return found


def rows(kind: str) -> list[dict[str, Any]]:
    return [train({**KINDS[kind], "zero.stage": stage}) for stage in STAGES]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_same_bits_and_hold_their_bytes(ranks, kind):
    config = Config.from_mapping({**KEYS, **KINDS[kind]})
    micro = config.trainer.accumulate_grad_batches
    results = ranks(RANKS)(rows, kind)
    for found in results:
        for stage, row in zip(STAGES, found, strict=True):
            wanted = state_bytes(model_of(config), stage, RANKS, summed_apart=micro > 1)
            kinds = {name: tiers["device"] for name, tiers in row["state"].items()}
            assert kinds == {
                "params": wanted.params,
                "grads": wanted.grads,
                "optim": wanted.optim,
            }
            # Biases of gates, and the loads that they have seen, lie beside the state.
            loads = row["buffers"] // 4 * 8
            assert row["counted"] == wanted.total + row["buffers"] + loads
            # 2 sequences of 8 tokens with 2 experts each, in every step
            assert row["routed"] == [2 * 8 * 2 * STEPS * micro] * 2
    weights = [row["weights"] for row in results[0]]
    assert weights[0] and all(other == weights[0] for other in weights[1:])


def tiers(folder: str) -> list[dict[str, Any]]:
    kinds = ("none", "cpu", "nvme", "cpu_params", "nvme_params")
    base = {**KINDS["top2"], "zero.stage": 3}
    found = []
    for kind in kinds:
        keys = {"offload.kind": kind}
        if kind.startswith("nvme"):
            keys["offload.nvme.dir"] = folder
        found.append(train({**base, **keys}))
    return found


def test_tiers_give_the_same_bits(ranks, tmp_path):
    found = ranks(RANKS)(tiers, str(tmp_path))[0]
    assert all(row["weights"] == found[0]["weights"] for row in found)
    assert [row["state"]["optim"]["device"] > 0 for row in found] == [True] + [False] * 4
    assert [row["state"]["params"]["device"] > 0 for row in found] == [True] * 3 + [False] * 2


def what_happens(stage: int, keys: dict[str, Any]) -> Any:
    config = Config.from_mapping({**KEYS, **keys, "zero.stage": stage})
    model = model_of(config)
    engine = Engine(model, build_optimizer(config.optim, model.named_parameters()), config)
    for _ in range(2 * config.trainer.accumulate_grad_batches):
        tokens = torch.arange(16).view(2, 8)
        engine.backward(engine(tokens, tokens) + auxiliary_loss(model))
        engine.step()
    found = engine.ledger.state_bytes(), engine.ledger.comm_bytes_per_step()
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_is_what_happens(ranks, stage):
    """With the two optimizer groups of ``optim.build``; loads of gates are control traffic."""
    keys = KINDS["biased"]
    config = Config.from_mapping({**KEYS, **keys, "zero.stage": stage})
    plan = predict(config, param_specs(config.model, config.moe))
    for rank, (state, sent) in enumerate(ranks(RANKS)(what_happens, stage, keys)):
        assert state == plan.state_bytes[rank]
        assert sent == plan.comm_bytes_per_step[rank]


@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_is_what_happens_with_experts_on_two_ranks(ranks, stage):
    """To the byte, but for the tokens: how many leave a rank its gates decide. Of 12 experts of
    each of 2 layers, 2 a token, half are elsewhere where all are even."""
    keys = {**KINDS["biased"], "zero.stage": stage}
    keys["moe"] = {**keys["moe"], "expert_parallel": 2}
    keys["data.seq_len"] = 8
    config = Config.from_mapping({**KEYS, **keys})
    plan = predict(config, param_specs(config.model, config.moe))
    tokens = 0
    for rank, (state, sent) in enumerate(ranks(RANKS)(what_happens, stage, keys)):
        wanted = dict(plan.comm_bytes_per_step[rank])
        # 2 micro-batches, 2 layers, 16 tokens to 2 experts, 16 fp32 channels, 4 journeys
        even = 2 * 2 * 16 * 2 * 16 * 4 * 4 // 2
        assert wanted.pop("all_to_all") == even // 2  # the plan has 4 sequences, 2 micro-batches
        tokens += sent.pop("all_to_all")
        assert state == plan.state_bytes[rank]
        assert sent == wanted
    assert 0 < tokens < 2 * 2 * even


@pytest.mark.parametrize("spread", [2, 4])
def test_the_plan_of_hybrid_shards_is_what_happens(ranks, spread):
    """A copy of the dense weights on 2 of 4 ranks; of experts on 2, or on all 4 of them."""
    keys = {
        **KINDS["top2"],
        "zero.shard_size": 2,
        "trainer": {**KEYS["trainer"], "devices": 4},
    }
    keys["moe"] = {**keys["moe"], "expert_parallel": spread}
    config = Config.from_mapping({**KEYS, **keys, "zero.stage": 3})
    plan = predict(config, param_specs(config.model, config.moe))
    for rank, (state, sent) in enumerate(ranks(4)(what_happens, 3, keys)):
        assert state == plan.state_bytes[rank]
        wanted = plan.comm_bytes_per_step[rank]
        assert wanted.pop("all_to_all") and sent.pop("all_to_all")
        assert sent == wanted
