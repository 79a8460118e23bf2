"""Config as a value: built from mappings, compared, written out and read again."""

from __future__ import annotations

import json
import pickle
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from zeroexp.config import Config
from zeroexp.errors import ConfigError


def problems(partial: Mapping[Any, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(partial)
    return {p.key: f"{p.problem} {p.fix}" for p in caught.value.problems}


class Lazy(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __getitem__(self, name: str) -> Any:
        return {"zero": MappingProxyType({"stage": 3})}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(["zero"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    "partial",
    [
        {"zero": {"stage": 3}},
        {"zero.stage": 3},
        Lazy(),
        ChainMap({"zero": {"stage": 3}}),
        OmegaConf.create({"zero": {"stage": "${trainer.devices}"}, "trainer": {"devices": 3}}),
    ],
    ids=["nested", "dotted", "mapping", "chainmap", "omegaconf"],
)
def test_any_mapping_is_accepted(partial: Mapping[str, Any]) -> None:
    assert Config.from_mapping(partial).zero.stage == 3


def test_nothing_is_the_defaults() -> None:
    assert Config.from_mapping() == Config.from_mapping({}) == Config()


def test_a_kind_may_stand_for_its_section() -> None:
    config = Config.from_mapping({"optim": "sgd", "recompute": "full"})
    assert (config.optim.kind, config.recompute.kind) == ("sgd", "full")


@pytest.mark.parametrize(
    ("partial", "key", "words"),
    [
        ({"zero": {"stag": 2}}, "zero.stag", ["zero.stage", "ZeRO stage 0-3, default 1"]),
        ({"optm": {"lr": 1}}, "optm", ["no such key", "optim"]),
        ({"optm.lr": 1}, "optm.lr", ["no such section as optm", "optim.lr"]),
        ({"stage": 3}, "stage", ["zero.stage"]),
        ({"zero.lr": 1}, "zero.lr", ["optim.lr"]),
        ({"trainer.gradient_accumulation_steps": 2}, None, ["trainer.accumulate_grad_batches"]),
        ({"gradient_clipping": 1}, "gradient_clipping", ["trainer.gradient_clip_val"]),
        ({"train_batch_size": 8}, "train_batch_size", ["data.batch_size"]),
        ({"zero": {"reduce_bucket_size": 5e8}}, "zero.reduce_bucket_size", ["zero.bucket"]),
        ({"xyzzy": 1}, "xyzzy", ["docs/configuration.md"]),
        ({"zero": 3}, "zero", ["3 is not a section", "zero.stage=1"]),
        ({"checkpoint": None}, "checkpoint", ["Off is checkpoint.kind=none"]),
        ({"zero": {"stage": 2}, "zero.stage": 3}, "zero.stage", ["given twice"]),
        ({3: 1}, "3", ["not a key"]),
        ({"offload": "ssd"}, "offload.kind", ["'ssd' is not a choice", "cpu_params"]),
        ({"offload": {"kind": "nvm"}}, "offload.kind", ["Did you mean nvme?"]),
        # NV-05: keys of swap files in the wrong section, or under another system's names.
        ({"zero": {"aio": {"block_size": 1}}}, "zero.aio", ["Did you mean  offload.nvme  (a"]),
        ({"zero": {"nvme": {"dir": "/x"}}}, "zero.nvme", ["Did you mean  offload.nvme  (a"]),
        ({"zero.aio.block_size": 1}, None, ["Did you mean  offload.nvme.block_size "]),
        ({"zero.nvme.dir": "/x"}, None, ["Did you mean  offload.nvme.dir "]),
        ({"nvme": {"dir": "/x"}}, "nvme", ["Did you mean  offload.nvme  (a section: dir, "]),
        ({"offload.block_size": 1}, None, ["Did you mean  offload.nvme.block_size "]),
        ({"offload.queue_depth": 1}, None, ["Did you mean  offload.nvme.queue_depth "]),
        ({"offload.nvme.chunk": 1}, None, ["Did you mean  offload.chunk "]),
        ({"offload.nvme.thread_count": 1}, None, ["Did you mean  offload.nvme.threads "]),
        ({"zero.offload_optimizer.device": "cpu"}, None, ["Did you mean  offload.optim "]),
        (
            {"zero": {"offload_param": {"device": "nvme"}}},
            "zero.offload_param",
            ["Did you mean  offload.params "],
        ),
        ({"zero.offload_optimizer.nvme_path": "/x"}, None, ["offload.nvme.dir "]),
        ({"zero.offload_optimizer.ratio": 0.5}, None, ["offload.fraction "]),
        ({"offload.pin_memory": True}, None, ["pinned wherever there is an accelerator"]),
        ({"offload.loss_scale": {"init": 8}}, None, ["precision.loss_scale  (a section: mode,"]),
        ({"precision.init": 8}, None, ["Did you mean  precision.loss_scale.init "]),
        ({"pipeline": "2f1b"}, "pipeline.schedule", ["Did you mean 1f1b?", "none, 1f1b, gpipe"]),
        ({"pipeline": None}, "pipeline", ["Off is pipeline.schedule=none."]),
        ({"pipeline.kind": "1f1b"}, None, ["Did you mean  pipeline.schedule "]),
        ({"pipeline.num_stages": 2}, None, ["Did you mean  pipeline.stages "]),
        ({"pipeline.cut": "size"}, None, ["parameters, layers, time"]),
        ({"pipeline.cut": [1, 0]}, None, ["0 is out of range", "a list of integers of at least 1"]),
        ({"pipeline.cut": [1, "a"]}, None, ["a is a string"]),
        ({"pipeline.cut": 3}, None, ["3 is a number", "parameters, layers, time or a list"]),
        ({"moe": {"kind": "top_2"}}, "moe.kind", ["Did you mean top2?", "none, top1, top2"]),
        ({"moe.num_experts": 4}, None, ["Did you mean  moe.experts "]),
        ({"checkpoint.kind": "sharded"}, "checkpoint.kind", ["arrives with", "none, full"]),
        ({"recompute.kind": "selective"}, "recompute.kind", ["arrives with selective recompute"]),
        ({"tensor": {"size": 2}}, "tensor", ["arrives with tensor and sequence parallelism"]),
        ({"sequence_parallel.size": 2}, "sequence_parallel.size", ["arrives with tensor"]),
        ({"model.kind": "hf"}, "model.kind", ["arrives with the Hugging Face models"]),
    ],
)
def test_what_does_not_exist_is_named_with_the_nearest_that_does(
    partial: Mapping[Any, Any], key: str | None, words: list[str]
) -> None:
    found = problems(partial)
    assert list(found) == [key or next(iter(partial))]
    for word in words:
        assert word in next(iter(found.values()))


def test_all_problems_come_in_one_report() -> None:
    found = problems(
        {
            "zero": {"stgae": 3, "bucket": "64MB"},
            "optim": {"lr": "fast"},
            "offload": "ssd",
            "data.batch_size": 7,
            "trainer.devices": 2,
        }
    )
    assert set(found) == {
        "zero.stgae",
        "zero.bucket",
        "optim.lr",
        "offload.kind",
        "data.batch_size",
    }


def test_a_rule_is_silent_about_keys_that_are_wrong_by_themselves() -> None:
    found = problems({"trainer.devices": "two", "data.batch_size": 7})
    assert set(found) == {"trainer.devices"}


def test_the_message_has_one_line_per_problem_in_columns() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"zero.stgae": 3, "zero.shard_size": 4, "trainer.devices": 6})
    assert str(caught.value).splitlines() == [
        "3 problems in the configuration",
        "  zero.stgae       no such key.                  "
        "Did you mean  zero.stage  (ZeRO stage 0-3, default 1)?",
        "  zero.shard_size  4 has no meaning at stage 1.  "
        "Use zero=hybrid (stage 3), or leave zero.shard_size out.",
        "  zero.shard_size  4 does not divide 6 ranks.    "
        "6 ranks = replicate 1.5 x shard 4; use 1, 2, 3 or 6.",
    ]
    assert caught.value.exit_code == 2


def test_free_keys_below_kwargs_are_joined() -> None:
    partial = {
        "model.kind": "external",
        "model.target": "a.b:C",
        "model.kwargs.depth": 3,
        "model.kwargs.norm.eps": 1e-5,
        "model.kwargs": {"norm": {"name": "rms"}},
    }
    config = Config.from_mapping(partial)
    assert config.model.kwargs == {"depth": 3, "norm": {"eps": 1e-5, "name": "rms"}}


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.zero.stage = 3  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        config.zero.stagee = 3  # type: ignore[attr-defined]


def test_updated_keeps_the_rest_and_checks_the_whole() -> None:
    config = Config.from_mapping({"optim.lr": 0.5, "trainer.devices": 4})
    changed = config.updated({"zero": {"stage": 3, "shard_size": 2}})
    assert (changed.optim.lr, changed.zero.shard_size, config.zero.stage) == (0.5, 2, 1)
    with pytest.raises(ConfigError, match="does not divide 4 ranks"):
        changed.updated({"zero.shard_size": 3})


def test_get_reads_by_dotted_name() -> None:
    assert Config().get("precision.loss_scale.init") == 65536.0
    for missing in ("zero.nothing", "nothing", "zero.stage.more"):
        with pytest.raises(KeyError, match=missing):
            Config().get(missing)


def test_every_leaf_is_in_to_dict() -> None:
    def count(node: Any) -> int:
        if is_dataclass(node):
            return sum(count(getattr(node, f.name)) for f in fields(node))
        return 1

    def leaves(node: Any) -> int:
        return sum(leaves(v) for v in node.values()) if isinstance(node, dict) and node else 1

    assert leaves(Config().to_dict()) == count(Config())


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda text: text.strip() and text != "none"
)
POWERS = st.integers(0, 3).map(lambda n: 2**n)


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    """A partial mapping that keeps every rule by construction."""
    devices, accumulate, micro = draw(POWERS), draw(POWERS), draw(st.integers(1, 5))
    stage = draw(st.integers(0, 3))
    compute = draw(st.sampled_from(["auto", "fp32", "bf16", "fp16", "fp64"]))
    heads, head = draw(POWERS), 2 * draw(st.integers(1, 40))
    partial: dict[str, Any] = {
        "name": draw(WORDS),
        "tag": draw(st.none() | WORDS),
        "zero": {
            "stage": stage,
            "unit": draw(st.sampled_from(["block", "model", "leaf", "a.*,b.*"])),
            "prefetch": draw(st.integers(0, 9)),
            "overlap": draw(st.booleans()),
            "reshard_after_forward": draw(st.sampled_from(["true", "false", "auto", True, False])),
            "reduce": draw(st.sampled_from(["auto", "each", "last"])),
            "bucket": draw(st.integers(64, 2**40)),
        },
        "precision": {"compute": compute, "nonfinite": draw(st.sampled_from(["auto", "skip"]))},
        "optim": {
            "lr": draw(st.floats(0, 10)),
            "betas": draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
        },
        "model": {
            "dim": heads * head,
            "heads": heads,
            "kv_heads": draw(st.none() | st.just(1)),
            "tied": draw(st.booleans()),
            "hidden": draw(st.none() | st.integers(1, 999)),
        },
        "data": {"micro_batch_size": micro, "seed": draw(st.none() | st.integers(0, 99))},
        "trainer": {
            "devices": devices,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": draw(st.none() | st.floats(1e-6, 10)),
        },
        "logger": {"kinds": draw(st.lists(st.sampled_from(["csv", "tensorboard"]), unique=True))},
    }
    if draw(st.booleans()):
        partial["data"]["batch_size"] = micro * devices * accumulate
    if stage == 3 and draw(st.booleans()):
        partial["zero"]["shard_size"] = draw(st.sampled_from(["node", 1, devices]))
    if compute == "fp16":
        partial["precision"]["loss_scale"] = {"init": draw(st.floats(1, 2**20)), "interval": 7}
    return partial


@given(valid())
def test_every_valid_config_reads_back_equal(partial: dict[str, Any]) -> None:
    config = Config.from_mapping(partial)
    for again in (
        Config.from_mapping(config.to_dict()),
        Config.from_mapping(json.loads(json.dumps(config.to_dict()))),
        Config.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_dict()))),
        pickle.loads(pickle.dumps(config)),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert again.digest() == config.digest()


@given(valid())
def test_a_resolved_config_is_valid_and_resolving_again_changes_nothing(
    partial: dict[str, Any],
) -> None:
    config = Config.from_mapping(partial)
    resolved = config.resolved()
    assert resolved.resolved() == resolved
    assert Config.from_mapping(resolved.to_dict()) == resolved
    assert resolved.digest() == config.digest()


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists),
    st.data(),
)
def test_no_value_whatever_escapes_as_another_error(value: Any, data: st.DataObject) -> None:
    from zeroexp.config.tree import KEYS

    key = data.draw(st.sampled_from(sorted(KEYS)))
    try:
        Config.from_mapping({key: value}).to_dict()
    except ConfigError as error:
        assert error.problems
