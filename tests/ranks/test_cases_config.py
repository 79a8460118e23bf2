"""Published cases of the configuration that concern numbers of the engine (deepspeed 3.A)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from small import settings, sgd_engine
from torch import nn

import zeroexp
from zeroexp.config import Config
from zeroexp.errors import ConfigError


def accepted(mapping: dict[str, Any]) -> bool:
    try:
        Config.from_mapping(mapping)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("batch", "micro", "accumulate", "right"),
    [(32, 16, 1, True), (32, 8, 2, True), (33, 17, 2, False), (32, 18, 1, False)],
)
def test_ds1_the_batch_equation(batch, micro, accumulate, right):
    """deepspeed 3.A 1: on two ranks."""
    mapping = {
        "data": {"batch_size": batch, "micro_batch_size": micro},
        "trainer": {"devices": 2, "accumulate_grad_batches": accumulate},
    }
    assert accepted(mapping) == right


def test_ds7_an_unknown_key_of_zero():
    """deepspeed 3.A 7."""
    with pytest.raises(ConfigError, match="stagee"):
        Config.from_mapping({"zero": {"stagee": 2}})


@pytest.mark.parametrize("key", ["init", "floor", "growth", "backoff"])
@pytest.mark.parametrize("value", [True, -1.0, float("inf"), float("nan"), "many"])
def test_ds14_loss_scales_that_make_no_sense(key, value):
    """deepspeed 3.A 14: booleans, negative and infinite values are refused by name."""
    with pytest.raises(ConfigError, match=f"loss_scale.{key}"):
        Config.from_mapping({"precision": {"compute": "fp16", "loss_scale": {key: value}}})


def test_ds14_numbers_of_any_kind():
    """deepspeed 3.A 14: ints and floats are numbers; a number in quotes is refused as a string."""
    for value in (1024, 1024.0, 1.024e3):
        mapping = {"precision": {"compute": "fp16", "loss_scale": {"init": value}}}
        assert Config.from_mapping(mapping).precision.loss_scale.init == 1024.0
    with pytest.raises(ConfigError, match=r"loss_scale.init.*string"):
        Config.from_mapping({"precision": {"compute": "fp16", "loss_scale": {"init": "1024"}}})


def test_ds16_clipping_by_default():
    """deepspeed 3.A 16: 1.0 unless said otherwise; 0 and none switch it off."""
    assert Config.from_mapping({}).trainer.gradient_clip_val == 1.0
    for off in (0, None):
        clip = Config.from_mapping(
            {"trainer": {"gradient_clip_val": off}}
        ).trainer.gradient_clip_val
        assert not clip
    given = Config.from_mapping({"trainer": {"gradient_clip_val": 0.25}})
    assert given.trainer.gradient_clip_val == 0.25


@pytest.mark.parametrize(("clip", "after"), [(None, 6.0), (0, 6.0), (1.5, 1.5)])
def test_ds16_what_clipping_does(clip, after):
    """deepspeed 3.A 16: what the engine does with it (one process, no group)."""
    layer = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(layer.weight)
    engine = sgd_engine(layer, 1, lr=1.0, clip=clip)
    engine.backward(3 * engine(layer.weight.new_ones(1, 4)).sum())
    engine.step()
    assert float(engine.grad_norm) == pytest.approx(6.0)
    assert float(layer.weight.detach().norm()) == pytest.approx(after, rel=1e-5)
    engine.close()


def test_settings_are_those_of_the_tests():
    """The mapping the rank tests use changes what it names and nothing else."""
    plain = Config.from_mapping(
        {"trainer": {"gradient_clip_val": None}, "precision.compute": "fp32"}
    )
    assert Config.from_mapping(settings(1)).to_dict() == plain.to_dict()


def test_public_names_stay_what_they_are():
    """A module of the package must not take the place of a function of the same name."""
    for path in Path(zeroexp.__file__).parent.glob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            importlib.import_module(f"zeroexp.{path.stem}")
    for _ in range(2):
        for name in ("Config", "Engine", "gathered", "initialize", "sharded_init"):
            assert callable(getattr(zeroexp, name)), name
