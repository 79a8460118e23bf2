"""State per tier and traffic between tiers, against the papers' figures (ZeRO-Offload,
arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857). M is the number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroexp.config import Config, steps_in_backward
from zeroexp.config.sections.offload import OFFLOAD_TIERS
from zeroexp.layout import ParamSpec
from zeroexp.plan import Prediction, predict

M = 3 * 64 * 64
SPECS = [
    ParamSpec("emb.weight", (64, 64)),
    ParamSpec("blocks.0.weight", (64, 64)),
    ParamSpec("blocks.1.weight", (64, 64)),
]
TIERS = ("device", "cpu", "nvme")
#: The papers' mixed precision: 2 bytes of parameter and gradient, K = 12 of optimizer state.
MIXED = {"compute": "bf16", "accumulate": "bf16", "reduce": "bf16"}


def plan(
    stage: int,
    offload: Any,
    ranks: int = 4,
    precision: Any = None,
    specs: list[ParamSpec] = SPECS,
    **more: Any,
) -> Prediction:
    config = {
        "zero.stage": stage,
        "offload": offload,
        "trainer.devices": ranks,
        "trainer.gradient_clip_val": None,
        "precision": precision or MIXED,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return predict(Config.from_mapping(config), specs)


def over_ranks(by_rank: dict[int, dict[str, int]]) -> dict[str, int]:
    return {way: sum(moved[way] for moved in by_rank.values()) for way in by_rank[0]}


def held(found: Prediction, tier: str, rank: int = 0) -> dict[str, int]:
    return {kind: tiers[tier] for kind, tiers in found.state_bytes[rank].items()}


# ------------------------------------------------------------------ ZeRO-Offload


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_m_go_down_and_two_m_come_up(kind: str, stage: int, ranks: int) -> None:
    """Section 4.1: the cut of least volume moves 4M bytes, 2M of gradients and 2M of parameters."""
    found = plan(stage, kind, ranks)
    assert over_ranks(found.transfer_bytes_per_step) == {"down": 2 * M, "up": 2 * M}


def test_at_stage_0_every_rank_moves_its_own_copy() -> None:
    for moved in plan(0, "cpu").transfer_bytes_per_step.values():
        assert moved == {"down": 2 * M, "up": 2 * M}


def test_gradients_summed_in_fp32_go_down_as_four_m() -> None:
    found = plan(2, "cpu", precision={**MIXED, "accumulate": "fp32"})
    assert over_ranks(found.transfer_bytes_per_step) == {"down": 4 * M, "up": 2 * M}


@pytest.mark.parametrize(
    ("stage", "reduce", "times"),
    [(0, "last", 1), (1, "each", 1), (2, "each", 4), (2, "last", 1), (3, "each", 4)],
)
def test_owned_gradients_leave_with_every_reduction(stage: int, reduce: str, times: int) -> None:
    found = plan(
        stage, "cpu", zero__reduce=reduce, trainer__accumulate_grad_batches=4, data__batch_size=16
    )
    copies = 4 if stage == 0 else 1
    moved = over_ranks(found.transfer_bytes_per_step)
    assert moved == {"down": 2 * M * times * copies, "up": 2 * M * copies}


@pytest.mark.parametrize(
    ("stage", "device"),
    [(2, 2), (1, 4)],  # gradients and update on the CPU; the update alone
)
def test_device_memory_is_that_of_the_papers_table_1(stage: int, device: int) -> None:
    found = plan(stage, "cpu", 1)
    assert sum(held(found, "device").values()) == device * M
    assert sum(held(found, "cpu").values()) == (16 - device) * M
    assert sum(held(found, "nvme").values()) == 0


def test_without_offload_nothing_moves() -> None:
    found = plan(3, "none")
    assert found.transfer_bytes_per_step == {rank: {} for rank in range(4)}
    assert found.io_bytes_per_step[0] == {"read": 0, "written": 0}
    assert found.offloaded == 0


def test_the_table_of_the_how_to_is_what_is_planned() -> None:
    page = Path(__file__).parents[3] / "docs" / "offload.md"
    table = page.read_text(encoding="utf-8").partition("| | device | host |")[2].split("\n\n")[0]
    rows = [[c.strip(" `") for c in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(OFFLOAD_TIERS)
    blocks = [ParamSpec(f"blocks.{i}.weight", (64, 64)) for i in range(3)]
    for kind, *numbers in rows:
        found = plan(3, kind, precision={"compute": "bf16"}, specs=blocks)
        tiers = [sum(sum(held(found, t, r).values()) for r in range(4)) for t in TIERS]
        moved = [found.transfer_bytes_per_step[0].get(way, 0) * 4 for way in ("down", "up")]
        files = [found.io_bytes_per_step[0][way] * 4 for way in ("read", "written")]
        assert [int(n) * M for n in numbers] == [*tiers, *moved, *files]


# ------------------------------------------------------------------ every kind at every stage


@pytest.mark.parametrize(
    ("kind", "optim", "params", "grads"),
    [
        ("none", "device", "device", "device"),
        ("cpu", "cpu", "device", "cpu"),
        ("nvme", "nvme", "device", "cpu"),
        ("cpu_params", "cpu", "cpu", "cpu"),
        ("nvme_params", "nvme", "nvme", "nvme"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_kind_of_state_is_on_its_tier(
    kind: str, optim: str, params: str, grads: str, stage: int
) -> None:
    found = plan(stage, kind)
    wanted: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}
    wanted[params]["params"] = 2 * M / (4 if stage == 3 else 1)
    wanted[grads if stage >= 2 else "device"]["grads"] = 2 * M / (4 if stage >= 2 else 1)
    wanted[optim]["optim"] = 12 * M / (4 if stage >= 1 else 1)
    for tier, kinds in wanted.items():
        assert held(found, tier) == {k: kinds.get(k, 0) for k in ("params", "grads", "optim")}


@pytest.mark.parametrize(
    ("precision", "optim", "params", "size"),
    [
        # fp32: parameters are stepped in place on their own tier in memory, else a copy is.
        ({"compute": "fp32"}, "device", "device", 8),
        ({"compute": "fp32"}, "cpu", "cpu", 8),
        ({"compute": "fp32"}, "cpu", "device", 12),
        ({"compute": "fp32"}, "device", "cpu", 12),
        ({"compute": "fp32"}, "nvme", "device", 12),
        ({"compute": "fp32"}, "nvme", "nvme", 12),
        # A master copy is the copy.
        (MIXED, "cpu", "cpu", 12),
        (MIXED, "nvme", "device", 12),
        # Without a wider master it is as wide as the parameters.
        ({**MIXED, "master": "none"}, "cpu", "cpu", 4),
        ({**MIXED, "master": "none"}, "cpu", "device", 6),
        ({**MIXED, "master": "none"}, "nvme", "nvme", 6),
    ],
)
def test_the_copy_that_is_stepped(precision: Any, optim: str, params: str, size: int) -> None:
    found = plan(3, {"optim": optim, "params": params}, precision=precision)
    assert held(found, optim)["optim"] == size * M // 4


def test_fp64_is_copied_as_fp64() -> None:
    found = plan(1, "cpu", 1, precision={"compute": "fp64"})
    assert held(found, "cpu")["optim"] == (8 + 8 + 8) * M


# ------------------------------------------------------------------ parameters off the device


@pytest.mark.parametrize("kind", ["cpu_params", "nvme_params"])
@pytest.mark.parametrize(
    ("stage", "micro", "reshard", "fetches", "reductions"),
    [
        (3, 1, "true", 2, 1),
        (3, 4, "true", 8, 4),
        (3, 1, "false", 1, 1),
        (0, 1, "true", 2, 1),
        (2, 2, "true", 4, 2),
    ],
)
def test_parameters_come_up_for_every_use(
    kind: str, stage: int, micro: int, reshard: str, fetches: int, reductions: int
) -> None:
    """ZeRO-Infinity, section 5.1: every parameter is loaded for forward and for backward."""
    found = plan(
        stage,
        kind,
        zero__reshard_after_forward=reshard,
        trainer__accumulate_grad_batches=micro,
        data__batch_size=8 * micro,
    )
    share = M // 4 if stage == 3 else M
    own = M if stage == 0 else M // 4
    moved = {"down": 2 * own * reductions, "up": 2 * share * fetches}
    assert found.transfer_bytes_per_step == {rank: moved for rank in range(4)}


def test_the_root_unit_that_stays_whole_comes_up_once() -> None:
    """The embedding is the root unit, a third of this model."""
    found = plan(3, "cpu_params", zero__reshard_after_forward="auto")
    assert over_ranks(found.transfer_bytes_per_step)["up"] == 2 * (M // 3) + 4 * (2 * M // 3)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_device_steps_goes_back_to_the_parameters_home(tier: str, stage: int) -> None:
    found = plan(stage, {"params": tier})
    copies = 4 if stage == 0 else 1
    assert over_ranks(found.transfer_bytes_per_step)["down"] == 2 * M * copies


# ------------------------------------------------------------------ swap files


def test_an_optimizer_on_disk_is_read_and_written_once() -> None:
    """The paper's optimizer states: 12 bytes of each parameter, both ways."""
    found = over_ranks(plan(3, "nvme").io_bytes_per_step)
    assert found == {"read": 12 * M, "written": 12 * M}


@pytest.mark.parametrize(
    ("micro", "more", "times"),
    [
        (1, {}, 0),  # stepped from memory
        (3, {}, 2),
        (1, {"offload.step_in_backward": "false"}, 1),
        (3, {"offload.step_in_backward": "false"}, 3),
        (1, {"trainer.gradient_clip_val": 1.0}, 1),
        (3, {"zero.reduce": "last"}, 0),
    ],
)
def test_parameters_and_gradients_on_disk(micro: int, more: dict[str, Any], times: int) -> None:
    found = plan(
        3,
        "nvme_params",
        **{k.replace(".", "__"): v for k, v in more.items()},
        trainer__accumulate_grad_batches=micro,
        data__batch_size=4 * micro,
    )
    grads = 2 * M * times
    assert over_ranks(found.io_bytes_per_step) == {
        "read": 12 * M + 2 * M * 2 * micro + grads,
        "written": 12 * M + 2 * M + grads,
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_every_rank_reads_the_whole_model(stage: int) -> None:
    found = plan(stage, {"params": "nvme"}).io_bytes_per_step
    assert found == {rank: {"read": 2 * M * 2, "written": 2 * M} for rank in range(4)}


# ------------------------------------------------------------------ parts of a model


def test_a_fraction_is_whole_segments_the_largest_first() -> None:
    """4, 2 and 1 KiElements of which three quarters may leave: 4, and then 1."""
    specs = [
        ParamSpec("blocks.0.weight", (1024, 1)),
        ParamSpec("blocks.1.weight", (4096, 1)),
        ParamSpec("blocks.2.weight", (2048, 1)),
    ]
    found = plan(2, {"kind": "cpu", "fraction": 0.75}, 1, specs=specs)
    assert found.offloaded == 5 / 7
    assert held(found, "cpu") == {"params": 0, "grads": 2 * 5120, "optim": 12 * 5120}
    assert held(found, "device") == {"params": 2 * 7168, "grads": 2 * 2048, "optim": 12 * 2048}
    assert found.transfer_bytes_per_step[0] == {"down": 2 * 5120, "up": 2 * 5120}


def test_what_stays_beside_parameters_that_left_is_stepped_as_a_copy() -> None:
    found = plan(3, {"kind": "cpu_params", "fraction": 0}, 1, precision={"compute": "fp32"})
    assert held(found, "device") == {"params": 0, "grads": 4 * M, "optim": 12 * M}
    assert held(found, "cpu") == {"params": 4 * M, "grads": 0, "optim": 0}
    # what the device stepped goes back to where the parameters are
    assert found.transfer_bytes_per_step[0] == {"down": 4 * M, "up": 2 * 4 * M}


def test_frozen_weights_leave_with_the_parameters_and_integers_never() -> None:
    specs = [
        ParamSpec("blocks.0.a.weight", (64, 64)),
        ParamSpec("blocks.0.b.weight", (64, 64), trainable=False),
        ParamSpec("blocks.0.c.table", (64,), "int64", trainable=False),
    ]
    found = plan(3, "nvme_params", 2, specs=specs, zero__reshard_after_forward="true")
    n = 4096 // 2
    assert held(found, "nvme") == {"params": 2 * 2 * n, "grads": 2 * n, "optim": 12 * n}
    assert held(found, "device") == {"params": 8 * 64, "grads": 0, "optim": 0}
    assert found.transfer_bytes_per_step[0] == {"down": 2 * n, "up": 2 * 2 * 2 * n}
    # frozen ones are read, and never written again
    assert found.io_bytes_per_step[0] == {"read": (12 + 8) * n, "written": (12 + 2) * n}


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"offload": "cpu"}, True),
        ({"offload": "none"}, False),
        ({"offload": {"params": "cpu"}}, False),
        ({"offload": "cpu", "trainer": {"gradient_clip_val": 1.0}}, False),
        ({"offload": "cpu", "trainer": {"gradient_clip_val": 0}}, True),
        ({"offload": {"kind": "nvme", "step_in_backward": False}}, False),
        ({"offload": {"kind": "nvme", "step_in_backward": True}}, True),
        ({"offload": {"kind": "nvme", "delayed_update": True}}, False),
        ({"offload": "cpu", "zero.stage": 0}, False),
        ({"offload": "cpu", "zero.stage": 2}, True),
        ({"offload": "cpu", "zero.shard_size": 1}, False),
        ({"offload": "cpu", "zero.shard_size": 2}, True),
        ({"offload": "cpu", "precision.compute": "fp16"}, False),
        ({"offload": "cpu", "precision.compute": "bf16"}, True),
        ({"offload": "cpu", "precision.nonfinite": "skip"}, False),
        ({"offload": "cpu", "precision.nonfinite": "apply"}, True),
        ({"offload": "cpu", "precision.loss_scale.mode": "static"}, False),
    ],
)
def test_a_unit_is_stepped_in_backward_where_nothing_waits(
    keys: dict[str, Any], steps: bool
) -> None:
    base = {
        "zero.stage": 3,
        "trainer": {"gradient_clip_val": None, "devices": 2},
        "precision.compute": "fp32",
    }
    config = Config.from_mapping({**base, **keys})
    assert steps_in_backward(config) is steps
    assert steps_in_backward(config.resolved()) is steps
    assert steps_in_backward(config, clips=True) is False
