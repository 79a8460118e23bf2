"""Arguments of ZeroStrategy: what they mean, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroexp.config import Config
from zeroexp.errors import ConfigError
from zeroexp.strategies.options import build_config, on_ranks


def build(config: Any = None, offload: Any = None, **zero: Any) -> Config:
    return build_config(config, zero, offload, None)


def problems(config: Any = None, offload: Any = None, **zero: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(config, offload, **zero)
    return {p.key: f"{p.problem} {p.fix}" for p in caught.value.problems}


def test_arguments_are_keys_of_the_zero_section() -> None:
    got = build(stage=3, prefetch=0, bucket="1MiB", unit="leaf").zero
    assert (got.stage, got.prefetch, got.bucket, got.unit) == (3, 0, 2**20, "leaf")
    assert build().zero.stage == 1


@pytest.mark.parametrize("kind", ["mapping", "dotted", "Config", "json", "yaml", "str"])
def test_a_config_may_come_in_any_form(kind: str, tmp_path: Path) -> None:
    tree = {"zero": {"stage": 2}, "precision": {"compute": "bf16"}}
    text = tmp_path / f"settings.{'yaml' if kind == 'yaml' else 'json'}"
    text.write_text(
        "zero: {stage: 2}\nprecision: {compute: bf16}\n" if kind == "yaml" else json.dumps(tree)
    )
    forms: dict[str, Any] = {
        "mapping": tree,
        "dotted": {"zero.stage": 2, "precision.compute": "bf16"},
        "Config": Config.from_mapping(tree),
        "json": text,
        "yaml": text,
        "str": str(text),
    }
    got = build(forms[kind])
    assert (got.zero.stage, got.precision.compute) == (2, "bf16")


def test_a_missing_file_is_named_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        build("conf/none.yaml")
    assert f"{tmp_path}/conf/none.yaml" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"offload": "nvme"},
        {"offload": {"kind": "nvme"}},
        {"config": {"offload": "nvme"}},
        {"config": {"offload.kind": "nvme"}},
    ],
)
def test_a_word_for_the_section_is_the_kind_of_offload(given: dict[str, Any]) -> None:
    got = build(**given).offload
    assert (got.optim_tier, got.params_tier) == ("nvme", "device")


def test_offload_may_be_a_mapping_of_its_keys() -> None:
    got = build(stage=3, offload={"kind": "nvme", "fraction": 0.5, "nvme": {"queue_depth": 8}})
    assert (got.offload.fraction, got.offload.nvme.queue_depth) == (0.5, 8)
    assert build(offload={"kind": "nvme", "nvme.dir": "/x"}).offload.nvme.dir == "/x"


def test_offload_that_cannot_be_is_refused_with_the_nearest() -> None:
    assert "Did you mean nvme?" in problems(offload="nvm")["offload.kind"]
    assert "offload.nvme.dir" in problems(offload={"nvme_path": "/x"})["offload.nvme_path"]
    assert "beside config" in problems({"zero": {"stage": 3}}, offload="cpu")["offload.kind"]


def test_every_problem_is_in_one_report() -> None:
    said = problems(stage=7, prefetch=-1, unit="")
    assert {"zero.stage", "zero.prefetch"} <= set(said)


def test_a_typo_in_a_mapping_has_a_hint() -> None:
    said = problems({"zero": {"stgae": 3}})
    assert "zero.stage" in said["zero.stgae"]


@pytest.mark.parametrize(
    ("config", "key", "word"),
    [
        ({"trainer": {"max_steps": 5}}, "trainer", "Trainer"),
        ({"trainer.max_steps": 5}, "trainer.max_steps", "Trainer"),
        ({"optim": {"lr": 1.0}}, "optim", "configure_optimizers"),
        ({"data": {"path": "x"}}, "data", "dataloaders"),
        ({"moe": {"kind": "top2"}}, "moe", "zeroexp.moe.MoE"),
        ({"launch": {"retries": 2}}, "launch.retries", "launch.timeout"),
    ],
)
def test_what_is_the_trainers_to_decide_is_refused(
    config: dict[str, Any], key: str, word: str
) -> None:
    """Accepted and ignored, such a key would be a setting that got lost."""
    assert word in problems(config)[key]


def test_a_whole_config_object_may_hold_everything() -> None:
    """train.py hands its configuration over as it is."""
    whole = Config.from_mapping({"trainer": {"max_steps": 5}, "zero": {"stage": 3}})
    assert build(whole).zero.stage == 3


def test_a_key_is_said_in_one_place() -> None:
    said = problems({"zero": {"stage": 2}}, stage=3)
    assert "beside config" in said["zero.stage"]


def test_the_deadline_may_stand_beside_a_config() -> None:
    got = build_config({"zero": {"stage": 2}}, {}, None, 12.0)
    assert (got.zero.stage, got.launch.timeout) == (2, 12.0)
    assert build({"launch": {"timeout": 7}}).launch.timeout == 7.0


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (2, 1), (5, 1), (4, 2)])
def test_the_config_follows_the_ranks_that_run(devices: int, nodes: int) -> None:
    """Also where the default batch would not come out: the batch is Lightning's."""
    got = on_ranks(Config(), "cpu", devices, nodes)
    assert (got.trainer.devices, got.trainer.num_nodes) == (devices, nodes)
    assert got.trainer.accelerator == "cpu"
    assert got.precision.compute in ("fp32", "bf16")  # no auto is left
    assert got.zero.reduce == "last"


def test_shard_size_is_checked_against_the_ranks_that_run() -> None:
    asked = build(stage=3, shard_size=1)
    with pytest.raises(ConfigError):
        on_ranks(
            Config.from_mapping({"zero": {"stage": 3, "shard_size": 2}, "trainer.devices": 2}),
            "cpu",
            3,
            1,
        )
    assert on_ranks(asked, "cpu", 3, 1).shard_size == 1


@pytest.mark.parametrize(
    ("config", "pipeline"),
    [
        (None, "1f1b"),
        (None, {"schedule": "1f1b", "stages": 2}),
        ({"pipeline": {"schedule": "1f1b"}}, None),
        ({"pipeline.schedule": "1f1b", "pipeline.stages": 2, "zero.stage": 1}, None),
    ],
)
def test_a_pipeline_waits_for_the_ranks_that_lightning_starts(config: Any, pipeline: Any) -> None:
    """The batch is of unknown size, so there are 4 micro-batches per rank of the pipe."""
    asked = build_config(config, {}, None, None, pipeline)
    assert asked.pipeline.size == 2
    for devices in (2, 4):
        placed = on_ranks(asked, "cpu", devices, 1)
        assert (placed.ranks, placed.data_ranks) == (devices, devices // 2)
        assert placed.pipeline.num_micro_batches(placed.micro_batch_size) == 8
    with pytest.raises(ConfigError, match="2 does not divide 3 ranks"):
        on_ranks(asked, "cpu", 3, 1)


def test_a_schedule_without_stages_stays_a_problem() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.stages  3 without a schedule"):
        build_config(None, {}, None, None, {"stages": 3})
