"""The planner of a pipeline against sums by hand, and against the built-in models' own layers."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch

from zeroexp.config import Config, compose
from zeroexp.errors import ConfigError
from zeroexp.layout import ParamSpec
from zeroexp.models.build import build
from zeroexp.models.specs import layer_shapes, num_params, param_specs
from zeroexp.moe import moe_layers
from zeroexp.pipeline.runtime.measure import layer_costs
from zeroexp.pipeline.runtime.split import layer_sizes, layers_of
from zeroexp.plan import Prediction, predict
from zeroexp.plan.layer_shape import LayerShape

# Four equal layers of 64 x 64. A token of width 64 leaves 100 elements behind in each.
WEIGHT = 64 * 64
SPECS = [ParamSpec(f"blocks.{i}.weight", (64, 64)) for i in range(4)]
SHAPES = [
    LayerShape(f"blocks.{i}", (f"blocks.{i}.",), 64, weights=WEIGHT, kept=100) for i in range(4)
]
SEQ = 16


def plan(schedule: str, stage: int = 1, devices: int = 4, **keys: Any) -> Prediction:
    """Two stages, 8 sequences of 16 tokens per data rank, fp32 AdamW."""
    data = 8 * devices // 2
    config = Config.from_mapping(
        {
            "pipeline": {"schedule": schedule, **keys},
            "trainer.devices": devices,
            "zero.stage": stage,
            "data": {"batch_size": data, "seq_len": SEQ},
            "precision.compute": "fp32",
        }
    )
    return predict(config, SPECS, SHAPES)


def device(found: Prediction, rank: int) -> dict[str, int]:
    return {kind: tiers["device"] for kind, tiers in found.state_bytes[rank].items()}


@pytest.mark.parametrize(
    ("stage", "params", "grads", "optim"), [(0, 4, 4, 8), (1, 4, 4, 4), (2, 4, 2, 4), (3, 2, 2, 4)]
)
def test_each_rank_holds_its_stage_over_the_data_ranks_of_its_stage(
    stage: int, params: int, grads: int, optim: int
) -> None:
    """2 of 4 layers a rank; over 2 data ranks the sharded kinds are halved."""
    found = plan("1f1b", stage)
    held = 2 * WEIGHT
    for rank in range(4):
        assert device(found, rank) == {
            "params": params * held,
            "grads": grads * held,
            "optim": optim * held,
        }
        assert found.padding_bytes[rank] == 0


@pytest.mark.parametrize(("schedule", "sends"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 3)])
def test_bytes_between_stages(schedule: str, sends: int) -> None:
    """Every micro-batch crosses a boundary once in each direction: in all, the batch of 8 x 16
    tokens x 64 elements of 4 bytes. Of interleaved's three boundaries each has one direction from
    each rank."""
    found = plan(schedule, micro_batches=4)
    assert [found.comm_bytes_per_step[rank]["send"] for rank in range(4)] == (
        [sends * 8 * SEQ * 64 * 4] * 4
    )
    twice = plan(schedule, micro_batches=8)
    assert twice.comm_bytes_per_step[0]["send"] == found.comm_bytes_per_step[0]["send"]


def test_accumulation_repeats_what_is_sent() -> None:
    config = Config.from_mapping(
        {
            "pipeline": {"schedule": "1f1b", "micro_batches": 4},
            "trainer": {"devices": 2, "accumulate_grad_batches": 3},
            "data": {"batch_size": 24, "seq_len": SEQ},
            "precision.compute": "fp32",
        }
    )
    found = predict(config, SPECS, SHAPES)
    assert found.comm_bytes_per_step[0]["send"] == 24 * SEQ * 64 * 4


def test_activations_alive_and_idle_time_of_1f1b() -> None:
    """min(m, p - r) micro-batches on rank r (arXiv:2006.09503); with equal stages the idle share is
    (p-1) / (m+p-1) (arXiv:1811.06965)."""
    made = plan("1f1b", micro_batches=4).pipeline
    assert made is not None
    each = 2 * SEQ * 100 * 4 * 2  # two sequences through two layers
    assert made.simulation.peak_bytes == (2 * each, 1 * each)
    assert made.simulation.bubble_fraction == pytest.approx(1 / 5)
    gpipe = plan("gpipe", micro_batches=4).pipeline
    assert gpipe is not None and gpipe.simulation.peak_bytes == (4 * each, 4 * each)


@pytest.mark.parametrize(
    ("schedule", "whole", "micro_batches"),
    [("1f1b", 1, 4), ("breadth_first", 1, 4), ("interleaved", 1, 4), ("interleaved", 2, 8)],
)
def test_gathers_of_stage_3_follow_the_order_of_the_schedule(
    schedule: str, whole: int, micro_batches: int
) -> None:
    """A stage is gathered whenever the list comes back to it: once per run of equal stages, or once
    where all of them may stay whole. A gather sends half of a stage's bytes."""
    found = plan(schedule, 3, whole_stages=whole, micro_batches=micro_batches)
    assert found.pipeline is not None
    lists = found.pipeline.schedule
    for rank in range(4):
        place = rank // 2
        used = [a.stage for _, a in lists.actions(place) if a.is_compute]
        held = lists.stages_of(place)
        runs = len(held) if whole == len(held) else len(list(groupby(used)))
        layers = 4 // len(lists.rank_of)
        assert found.comm_bytes_per_step[rank]["all_gather"] == runs * layers * WEIGHT * 4 // 2
        # Every micro-batch is reduced by itself, as at stage 3 without a pipeline.
        reduced = micro_batches * 2 * WEIGHT * 4 // 2
        assert found.comm_bytes_per_step[rank]["reduce_scatter"] == reduced
    if schedule == "breadth_first":
        # Forward through both stages, and back beginning with the one that is still whole.
        assert found.comm_bytes_per_step[0]["all_gather"] == 3 * WEIGHT * 4 // 2


def test_auto_chooses_and_its_memory_limit_decides() -> None:
    free = plan("auto", micro_batches=4).pipeline
    assert free is not None and free.choice is not None
    assert free.schedule.name == free.choice.won.name
    most = int(max(free.simulation.peak_bytes))
    tight = plan("auto", micro_batches=4, memory_limit=most - 1).pipeline
    assert tight is not None and max(tight.simulation.peak_bytes) < most
    assert tight.simulation.makespan > free.simulation.makespan
    each = 2 * SEQ * 100 * 4  # a micro-batch in one layer: a forward keeps that at least
    with pytest.raises(ConfigError, match="no schedule keeps its activations within"):
        plan("auto", micro_batches=4, memory_limit=each - 1)


def test_an_explicit_cut_is_taken() -> None:
    made = plan("1f1b", cut=[1, 3])
    assert made.pipeline is not None and made.pipeline.cut.sizes == (1, 3)
    assert device(made, 0)["params"] == 4 * WEIGHT
    assert device(made, 3)["params"] == 4 * 3 * WEIGHT


def test_offloaded_state_of_each_stage_is_on_its_tier() -> None:
    config = Config.from_mapping(
        {
            "pipeline": {"schedule": "1f1b", "cut": [1, 3]},
            "trainer.devices": 4,
            "zero.stage": 2,
            "offload": "cpu",
            "precision.compute": "fp32",
        }
    )
    found = predict(config, SPECS, SHAPES)
    for rank, layers in ((0, 1), (3, 3)):
        assert found.state_bytes[rank]["optim"]["device"] == 0
        # AdamW's two states and the copy that is stepped, of half of the elements.
        assert found.state_bytes[rank]["optim"]["cpu"] == 12 * layers * WEIGHT // 2
        # The gradients of every micro-batch go down as they are reduced.
        reductions = config.num_micro_batches
        assert found.transfer_bytes_per_step[rank]["down"] == reductions * 4 * layers * WEIGHT // 2
    assert found.offloaded == 1


MODELS = [
    "model=gpt_tiny",
    "model=gpt_tiny model.tied=false model.positions=learned",
    "model=gpt_tiny model.norm=layernorm model.bias=true",
    "model=gpt_tiny model.kv_heads=2 model.activation=swiglu",
    "model=gpt_tiny recompute=full",
    "model=mlp model.bias=true",
    "model=mlp recompute=full",
]


@pytest.mark.parametrize("words", MODELS)
def test_shapes_are_those_of_the_models_own_layers(words: str) -> None:
    """Names, parameters and boundary sizes equal the module's; what is kept for backward equals
    what autograd was seen to save, but for the loss (not a layer) and the rotary tables (the same
    for every micro-batch)."""
    small = ["model.dim=64", "model.layers=2", "data.seq_len=32"]
    asked = compose([*words.split(), *small], environ={}, start=False).config
    asked = asked.updated({"precision.compute": "fp32"})
    recompute = asked.recompute.kind == "full"
    layers = layers_of(build(asked.model, asked.moe, seed=0, recompute=recompute))
    shapes = layer_shapes(asked.model, recompute=recompute)
    specs = param_specs(asked.model, asked.moe)
    assert asked.model.num_pipeline_layers == len(layers) == len(shapes)
    batch, length = 3, 32
    measured = layer_costs(layers, torch.zeros(batch, length, dtype=torch.int64), repeats=1)
    for shape, sized, cost in zip(shapes, layer_sizes(layers), measured, strict=True):
        params = sum(spec.numel for spec in specs if shape.names_of(spec))
        planned = shape.layer(params, batch * length, length, "float32")
        assert (planned.name, planned.params, planned.output) == (
            sized.name,
            sized.params,
            cost.output,
        )
        kept = cost.activations
        if shape.name == "head":
            kept += batch * length * (4 * asked.model.vocab_size + 8)
        elif shape.name.startswith("blocks") and asked.model.positions == "rotary":
            has_tables = asked.model.kind == "gpt" and not recompute
            kept -= has_tables * length * (64 // 4) * 4
        elif shape.name == "embedding" and asked.model.positions == "learned":
            kept -= (asked.model.kind == "gpt") * length * 8  # position ids, one row for all
        assert planned.activations == kept, shape.name


def test_a_tied_head_is_in_its_stage_too() -> None:
    def params(**keys: Any) -> list[int]:
        config = Config.from_mapping(
            {"pipeline": {"schedule": "1f1b"}, "trainer.devices": 2, "zero.stage": 0, **keys}
        )
        specs = param_specs(config.model, config.moe)
        found = predict(config, specs, layer_shapes(config.model))
        assert found.pipeline is not None
        made = found.pipeline
        return [sum(made.layers[i].params for i in made.cut.stage(s)) for s in range(2)]

    config = Config()
    embedding = config.model.vocab_size * config.model.dim
    assert sum(params()) == num_params(config.model) + embedding
    assert sum(params(**{"model.tied": False})) == num_params(config.model) + embedding


def test_a_rank_with_both_ends_of_a_tie_has_one_parameter() -> None:
    config = Config.from_mapping(
        {
            "pipeline": "zb_v",
            "trainer.devices": 2,
            "zero.stage": 0,
            "precision": {"compute": "fp32"},
        }
    )
    found = predict(config, param_specs(config.model, config.moe), layer_shapes(config.model))
    assert found.padding_bytes == {0: 0, 1: 0}
    total = sum(device(found, rank)["params"] for rank in range(2))
    assert total == 4 * num_params(config.model)


EXPERTS = [
    "moe=top1",
    "moe=top2 moe.every=2",
    "moe=top2 model.activation=swiglu moe.shared=1",
    "moe=topk moe.top_k=4 moe.experts=16",
    "moe=expert_choice",
    "moe=sigmoid moe.z_loss=0.1",
    "moe=top1 moe.residual=true moe.balance_loss=0",
    "moe=top1 recompute=full",
]


@pytest.mark.parametrize("words", EXPERTS)
def test_shapes_of_blocks_with_experts(words: str) -> None:
    """Parameters equal the module's. What tokens and gates leave for backward is within 1.5% of
    what autograd was seen to save, and the loss of each gate adds 4 bytes to what goes on."""
    small = ["model.dim=64", "model.layers=4", "data.seq_len=32"]
    asked = compose([*words.split(), *small], environ={}, start=False).config
    recompute = asked.recompute.kind == "full"
    layers = layers_of(build(asked.model, asked.moe, seed=0, recompute=recompute))
    shapes = layer_shapes(asked.model, asked.moe, recompute=recompute)
    specs = param_specs(asked.model, asked.moe)
    batch, length = 3, 32
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(asked.model.vocab_size, (batch, length), generator=draw)
    measured = layer_costs(layers, tokens, repeats=1)
    gates = 0
    for (_, module), shape, sized, cost in zip(
        layers, shapes, layer_sizes(layers), measured, strict=True
    ):
        params = sum(spec.numel for spec in specs if shape.names_of(spec))
        planned = shape.layer(params, batch * length, length, "float32")
        assert (planned.name, planned.params) == (sized.name, sized.params)
        kept = cost.activations
        if shape.name == "head":
            kept += batch * length * (4 * asked.model.vocab_size + 8)
        elif shape.name.startswith("blocks") and not recompute:
            kept -= length * (64 // 4) * 4  # the rotary tables
        assert planned.activations == pytest.approx(kept, rel=0.015), shape.name
        gates += len(moe_layers(module))
        made = "balance_loss=0" not in words and "expert_choice" not in words
        assert planned.output == cost.output + 4 * gates * (made and shape.name != "head")
