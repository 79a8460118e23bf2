"""What micro-batches log becomes what the whole batch would have logged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from zeroexp.errors import ModelError
from zeroexp.strategies.micro_log import MicroLog


class Told(pl.LightningModule):
    """Keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.told.append((name, value, kwargs))


class Plain(pl.LightningModule):
    pass


def recorded(*calls: Any) -> MicroLog:
    log = MicroLog(module := Plain())
    with log.recording():
        for args, kwargs in calls:
            module.log(*args, **kwargs)
    assert "log" not in module.__dict__
    return log


def test_numbers_are_combined_as_they_are_reduced() -> None:
    calls = []
    for value in (1.0, 2.0, 6.0):
        calls += [(("mean", value), {}), (("sum", value), {"reduce_fx": "sum"})]
        calls += [(("max", torch.tensor(value)), {"reduce_fx": torch.max})]
        calls += [(("min", value), {"reduce_fx": "min"})]
    found = recorded(*calls).of_batch([1.0, 1.0, 2.0])
    assert {name: value for name, (value, _) in found.items()} == {
        "mean": (1 + 2 + 2 * 6) / 4,
        "sum": 9.0,
        "max": 6.0,
        "min": 1.0,
    }
    assert found["max"][1] == {"reduce_fx": "max"}


def test_arguments_by_position_and_defaults_are_understood() -> None:
    log = recorded((("a", 1.0, True), {"logger": None, "enable_graph": False, "sync_dist": True}))
    assert log.of_batch([1.0]) == {"a": (1.0, {"prog_bar": True, "sync_dist": True})}


def test_batch_sizes_add_up() -> None:
    log = recorded(*[(("a", value), {"batch_size": 3}) for value in (1.0, 2.0)])
    assert log.of_batch([1.0, 1.0]) == {"a": (1.5, {"batch_size": 6})}


def test_a_number_that_is_not_logged_by_every_micro_batch_has_a_plain_mean() -> None:
    log = recorded((("a", 1.0), {}), (("a", 3.0), {}))
    assert log.of_batch([1.0, 5.0, 9.0])["a"][0] == 2.0


def test_a_sum_over_ranks_counts_a_pipe_once() -> None:
    log = MicroLog(module := Told())
    log.tell({"n": (8.0, {"reduce_fx": "sum", "sync_dist": True}), "m": (8.0, {})}, ranks=4)
    assert [(name, value) for name, value, _ in module.told] == [("n", 2.0), ("m", 8.0)]


def test_what_is_unheard_is_not_logged() -> None:
    log = MicroLog(module := Plain())
    with log.recording():
        module.log("a", 1.0)
        with pytest.raises(KeyError), log.unheard():
            module.log("a", 5.0)
            raise KeyError
    assert log.of_batch([1.0]) == {"a": (1.0, {})}


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (("a", torch.ones(2)), {}, "only numbers"),
        (("a", {"b": 1}), {}, "of a dict"),
        (("a", 1.0), {"reduce_fx": lambda values: values}, "reduce_fx=..."),
        (("a", 1.0), {"metric_attribute": "m"}, "metric_attribute=..."),
    ],
)
def test_what_other_ranks_cannot_be_told_is_refused(args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        recorded((args, kwargs))
