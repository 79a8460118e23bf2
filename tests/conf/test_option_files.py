"""The files of conf/: the groups of the design, no default restated, all of them valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from zeroexp.config import Config, compose
from zeroexp.config.groups import Groups
from zeroexp.config.sections.pipeline import SCHEDULES

CONF = Path(__file__).resolve().parents[2] / "conf"

# Section 9 of the design: the first option is the default.
FIRST = {
    "zero": "stage1",
    "offload": "none",
    "precision": "auto",
    "pipeline": "none",
    "moe": "none",
    "recompute": "none",
    "optim": "adamw",
    "schedule": "constant",
    "model": "gpt_tiny",
    "data": "stdlib",
    "trainer": "auto",
    "launch": "local",
    "measure": "default",
    "logger": "tensorboard",
    "checkpoint": "none",
    "paths": "default",
    "debug": "none",
    "experiment": "none",
}
OPTIONS = [
    (group, path.stem)
    for group in FIRST
    for path in sorted((CONF / group).glob("*.yaml"))
    if group != "experiment"
]
PRESETS = [path.stem for path in sorted((CONF / "experiment").glob("*.yaml"))]

# What an option needs besides itself.
NEEDS = {
    ("data", "text"): ["data.path=x"],
    ("data", "memmap"): ["data.path=x"],
    ("model", "external"): ["model.target=a.b:C"],
    **{("pipeline", name): ["trainer.devices=2"] for name in SCHEDULES},
}


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in node.items():
        if isinstance(value, dict):
            found.update(leaves(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = tuple(value) if isinstance(value, list) else value
    return found


def test_the_groups_and_their_defaults_are_those_of_the_design() -> None:
    assert Groups().defaults() == FIRST
    assert sorted(Groups().names()) == sorted(FIRST)


def test_options_hold_the_names_users_rely_on() -> None:
    have = set(OPTIONS)
    for group, names in {
        "zero": "stage0 stage1 stage2 stage3 hybrid",
        "precision": "auto fp32 bf16 fp16 bf16_pure",
        "offload": "none cpu nvme cpu_params nvme_params",
        "recompute": "none full",
        "pipeline": "none gpipe 1f1b interleaved breadth_first zb_h1 zb_v dualpipe_v auto",
        "moe": "none top1 top2 topk sigmoid expert_choice",
        "optim": "adamw adam sgd lion adagrad rmsprop",
        "schedule": "constant linear warmup_cosine inverse_sqrt one_cycle",
        "model": "gpt_tiny gpt_small gpt_medium gpt_xl mlp external",
        "data": "stdlib text memmap synthetic",
        "trainer": "auto cpu gpu",
        "launch": "local external",
        "measure": "default quick careful",
        "logger": "tensorboard jsonl csv wandb mlflow",
        "checkpoint": "none full",
    }.items():
        for name in names.split():
            assert (group, name) in have


def test_self_comes_first_in_the_only_primary_file() -> None:
    assert [path.name for path in CONF.glob("*.yaml")] == ["train.yaml"]
    content = yaml.safe_load((CONF / "train.yaml").read_text())
    assert content["defaults"][0] == "_self_"
    assert list(content) == ["defaults"]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_file_holds_only_what_differs_from_the_defaults(group: str, option: str) -> None:
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    assert content.pop("defaults") == [f"/schema/{group}@_here_", "_self_"]
    for name, value in leaves(content).items():
        assert Config().get(f"{group}.{name}") != value, f"{name} restates the default"
    if FIRST[group] == option:
        assert content == {}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_makes_a_valid_run(group: str, option: str) -> None:
    words = [f"{group}={option}", *NEEDS.get((group, option), [])]
    composed = compose(words, environ={}, start=False)
    assert composed.choices[group] == option


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_valid_run(preset: str) -> None:
    composed = compose([f"experiment={preset}"], environ={}, start=False)
    if preset != "none":
        assert composed.config.name == preset


def test_options_mean_what_they_are_called() -> None:
    def config(word: str) -> Config:
        return compose([word, "trainer.devices=2"], environ={}, start=False).config

    assert [config(f"zero=stage{n}").zero.stage for n in range(4)] == [0, 1, 2, 3]
    hybrid = config("zero=hybrid")
    assert (hybrid.zero.stage, hybrid.zero.shard_size, hybrid.shard_size) == (3, "node", 2)
    pure = config("precision=bf16_pure").precision
    assert (pure.compute, pure.master) == ("bf16", "none")
    fp16 = config("precision=fp16").resolved().precision
    assert (fp16.compute, fp16.master, fp16.loss_scale.mode) == ("fp16", "fp32", "dynamic")
    assert config("logger=csv").logger.kinds == ("csv",)
    # The published shapes: GPT-2 small, medium and xl.
    shapes = {"gpt_small": (768, 12, 12), "gpt_medium": (1024, 24, 16), "gpt_xl": (1600, 48, 25)}
    for name, shape in shapes.items():
        model = config(f"model={name}").model
        assert (model.dim, model.layers, model.heads) == shape
