"""Single values: what a key accepts, what it becomes, and the sentence for what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroexp.config import Config
from zeroexp.config.byte_size import format_bytes, parse_bytes
from zeroexp.errors import ConfigError


def value_of(key: str, value: Any) -> Any:
    return Config.from_mapping({key: value}).get(key)


def refusal(key: str, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({key: value})
    problems = [p for p in caught.value.problems if p.key == key]
    assert len(problems) == 1, caught.value
    return f"{problems[0].problem} {problems[0].fix}"


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("zero.bucket", 5e8, 500_000_000),
        ("zero.bucket", 1048576, 1048576),
        ("zero.bucket", "64MiB", 67_108_864),
        ("zero.bucket", "1.5 kib", 1536),
        ("zero.bucket", "2GiB", 2_147_483_648),
        ("trainer.max_steps", 1e3, 1000),
        ("optim.lr", 1, 1.0),
        ("trainer.gradient_clip_val", 0, None),
        ("trainer.gradient_clip_val", 0.0, None),
        ("trainer.gradient_clip_val", "none", None),
        ("trainer.gradient_clip_val", None, None),
        ("trainer.gradient_clip_val", 0.5, 0.5),
        ("tag", "none", None),
        ("tag", 7, "7"),
        ("zero.reshard_after_forward", False, "false"),
        ("zero.reshard_after_forward", True, "true"),
        ("launch.guard", False, "off"),
        ("precision.loss_scale.mode", False, "off"),
        ("optim.betas", [0, 0.5], (0.0, 0.5)),
        ("logger.kinds", "csv", ("csv",)),
        ("logger.kinds", ["csv", "tensorboard"], ("csv", "tensorboard")),
        ("logger.kinds", [], ()),
        ("logger.kinds", "none", ()),
    ],
)
def test_a_value_is_taken_in_the_type_of_its_key(key: str, written: Any, meant: Any) -> None:
    value = value_of(key, written)
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize(
    ("key", "written", "words"),
    [
        # The four of CF-04: a fraction, a quoted number, a small float, and the wanted type named.
        ("trainer.devices", 5.5, ["5.5 is a fraction", "an integer of at least 1"]),
        ("trainer.devices", "5e8", ["5e8 is a string", "an integer"]),
        ("zero.bucket", "5e8", ["'5e8' is not a byte size", "64MiB"]),
        ("zero.bucket", 1e-1, ["0.1 is a fraction", "bytes"]),
        ("zero.bucket", "64MB", ["Units are binary", "64MiB"]),
        ("zero.bucket", "64XiB", ["No such unit", "GiB"]),
        ("zero.bucket", "0.3B", ["whole number of bytes"]),
        ("zero.bucket", 3, ["3 is out of range", "at least 64"]),
        ("zero.stage", 4, ["4 is out of range", "from 0 to 3"]),
        ("zero.stage", True, ["true is a truth value", "an integer"]),
        ("zero.stage", None, ["null is not a value", "an integer"]),
        ("zero.stage", "stage3", ["stage3 is a string"]),
        ("zero.shard_size", "nodes", ["nodes is a string", "node or none"]),
        ("zero.overlap", "yes", ["yes is a string", "true or false"]),
        ("zero.overlap", 1, ["1 is a number", "true or false"]),
        ("optim.lr", "fast", ["fast is a string", "a number of at least 0"]),
        ("optim.lr", True, ["true is a truth value"]),
        ("optim.lr", math.nan, ["nan is out of range"]),
        ("optim.lr", math.inf, ["inf is out of range"]),
        ("optim.lr", -1, ["-1 is out of range"]),
        ("optim.betas", [0.9], ["[0.9] has 1 values", "a list of 2 numbers"]),
        ("optim.betas", 0.9, ["0.9 is a fraction", "a list of 2 numbers"]),
        ("optim.betas", [0.9, 1.0], ["1 is out of range", "below 1"]),
        ("optim.kind", "adamW", ["'adamW' is not a choice", "Did you mean adamw?"]),
        ("optim.kind", None, ["null is not a value"]),
        ("model.kwargs", [1], ["[1] is a list", "a mapping"]),
        ("paths.runs", "", ["the text is empty"]),
        ("paths.runs", ["a"], ["[a] is a list", "a string"]),
        ("logger.kinds", ["csv", "csv"], ["names one twice"]),
        ("logger.kinds", ["cvs"], ["'cvs' is not a choice", "Did you mean csv?"]),
        ("checkpoint.kind", None, ["null is not a value", "Off is kind=none"]),
        # A loss scale is no truth value, not negative and finite.
        ("precision.loss_scale.init", True, ["truth value"]),
        ("precision.loss_scale.init", -2.0, ["out of range", "above 0"]),
        ("precision.loss_scale.init", math.inf, ["out of range"]),
        ("precision.loss_scale.backoff", 1.0, ["out of range", "above 0 and below 1"]),
        ("precision.loss_scale.interval", 0, ["out of range"]),
        ("trainer.seed", 2**32, ["out of range"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_kind_and_what_is_wanted(
    key: str, written: Any, words: list[str]
) -> None:
    text = refusal(key, written)
    for word in words:
        assert word in text


@given(st.integers(1, 4095), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_binary_units_are_powers_of_1024(number: int, unit: str) -> None:
    power = 1 + ["KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_bytes(f"{number}{unit}") == number * 1024**power


@given(st.integers(0, 2**60))
def test_written_bytes_are_read_back(size: int) -> None:
    text = format_bytes(size)
    assert (int(text) if text.isdecimal() else parse_bytes(text)) == size
