"""The batch equation: batch_size = micro_batch_size x data ranks x accumulate_grad_batches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroexp.config import Config, compose
from zeroexp.errors import ConfigError, Problem


def batch(**keys: Any) -> tuple[int, int, int]:
    """batch_size, micro_batch_size and accumulation on two ranks."""
    names = {"train": "data.batch_size", "micro": "data.micro_batch_size"}
    accumulate = "trainer.accumulate_grad_batches"
    config = Config.from_mapping(
        {"trainer.devices": 2, **{names.get(k, accumulate): v for k, v in keys.items()}}
    )
    resolved = config.resolved()
    assert resolved.data.batch_size == config.batch_size
    assert resolved.data.micro_batch_size == config.micro_batch_size
    return config.batch_size, config.micro_batch_size, config.trainer.accumulate_grad_batches


def problem(partial: dict[str, Any]) -> Problem:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(partial)
    (only,) = caught.value.problems
    return only


# CF-02: the cases a to c, on two ranks.
def test_only_the_global_batch() -> None:
    assert batch(train=16) == (16, 8, 1)


def test_only_the_micro_batch() -> None:
    assert batch(micro=2) == (4, 2, 1)


def test_micro_batch_and_accumulation() -> None:
    assert batch(micro=2, accumulate=3) == (12, 2, 3)


def test_all_three_when_they_agree() -> None:
    assert batch(train=12, micro=2, accumulate=3) == (12, 2, 3)


def test_all_three_inconsistent_names_them_and_the_product() -> None:
    """CF-02 d: 16 is not 2 * 3 * 2 = 12."""
    found = problem(
        {
            "data.batch_size": 16,
            "data.micro_batch_size": 2,
            "trainer.accumulate_grad_batches": 3,
            "trainer.devices": 2,
        }
    )
    assert found.key == "data.batch_size"
    assert found.problem == "16 is not 2 x 2 x 3."
    assert "12 = micro_batch_size 2 x data ranks 2 x accumulate_grad_batches 3" in found.fix


def test_a_batch_that_does_not_divide() -> None:
    """CF-02 f: 7 on 2 ranks."""
    found = problem({"data.batch_size": 7, "trainer.devices": 2})
    assert found.problem == "7 is not divisible by 2 data ranks."
    assert "7 = micro_batch_size 3.5 x data ranks 2" in found.fix
    assert "use data.batch_size=6 or 8" in found.fix


def test_more_ranks_than_sequences() -> None:
    found = problem({"data.batch_size": 3, "trainer.devices": 2, "trainer.num_nodes": 2})
    assert found.problem == "3 sequences are fewer than 4 data ranks."
    assert "use data.batch_size=4," in found.fix


def test_the_fix_counts_the_micro_batches() -> None:
    found = problem(
        {"data.batch_size": 10, "trainer.devices": 2, "trainer.accumulate_grad_batches": 4}
    )
    assert found.problem == "10 is not divisible by 2 x 4."
    assert "use data.batch_size=8 or 16" in found.fix


def test_the_default_batch_holds_for_a_command_line_only() -> None:
    """A script with a loader of its own never makes batches from data.batch_size."""
    assert Config.from_mapping({"trainer.devices": 5}).resolved().data.batch_size is None
    with pytest.raises(ConfigError, match=r"24 \(the default\) is not divisible by 5 data ranks"):
        compose(["trainer.devices=5"])


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
def test_the_default_batch_comes_out_on_usual_numbers_of_ranks(devices: int) -> None:
    config = compose([f"trainer.devices={devices}"]).config
    assert config.micro_batch_size * devices == config.batch_size == 24


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_the_equation_decides_what_is_accepted(
    train: int, devices: int, nodes: int, accumulate: int
) -> None:
    partial = {
        "data.batch_size": train,
        "trainer.devices": devices,
        "trainer.num_nodes": nodes,
        "trainer.accumulate_grad_batches": accumulate,
    }
    parts = devices * nodes * accumulate
    if train % parts == 0:
        config = Config.from_mapping(partial)
        assert config.micro_batch_size * parts == train
    else:
        fix = problem(partial).fix
        offered = [int(word) for word in fix.split("batch_size=")[1].split(",")[0].split(" or ")]
        assert offered and all(size % parts == 0 for size in offered)
        assert all(abs(size - train) < parts for size in offered)
