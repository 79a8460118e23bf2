"""What training_step may return, and the one message for everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single_lab import Net, ZeroStrategy, data, trainer

from zeroexp.errors import ModelError, OptimizerError
from zeroexp.strategies.steps import check_output

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_tensor_or_a_mapping_with_one_is_taken() -> None:
    check_output(torch.ones(()))
    check_output({"loss": torch.ones(()), "more": 3})


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("x", "an object of type str: 'x'"),
        (None, "returned None"),
        (1.5, "an object of type float: 1.5"),
        ({"los": 1}, "a dict without 'loss' (it has 'los')"),
        ({}, "a dict without 'loss' (it has nothing)"),
        ({"loss": None}, "a dict whose 'loss' is None"),
    ],
)
def test_anything_else_is_one_sentence(output: Any, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_output(output)
    message = str(caught.value)
    assert said in message and message.endswith(".") and "\n" not in message


def test_both_reach_the_user_through_a_fit() -> None:
    class Words(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return "x"

    class Number(Net):
        def configure_optimizers(self) -> Any:
            return 3

    with pytest.raises(ModelError, match="type str"):
        trainer(ZeroStrategy(1)).fit(Words(), data())
    with pytest.raises(OptimizerError) as caught:
        trainer(ZeroStrategy(1)).fit(Number(), data())
    assert "\n" not in str(caught.value) and "Unknown configuration" in str(caught.value)
