"""A pipeline on one rank: what its owner is told, and that it is the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zeroexp.errors import StageError
from zeroexp.ledger import Ledger
from zeroexp.pipeline.action import Kind
from zeroexp.pipeline.cut import cut
from zeroexp.pipeline.residency import with_residency
from zeroexp.pipeline.runtime import Channel, Executor, layers_of, split, split_batch
from zeroexp.pipeline.runtime.split import layer_sizes
from zeroexp.pipeline.schedules.registry import make_schedule


class Listens:
    """An owner that writes down what it is told, as the list prints it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.last: list[str] = []
        self.failures = 0

    def unshard(self, stage: int) -> None:
        self.told.append(f"U{stage}")

    def reshard(self, stage: int) -> None:
        self.told.append(f"R{stage}")

    def reduce_grads(self, stage: int) -> None:
        self.told.append(f"G{stage}")

    @contextmanager
    def forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        self.told.append(f"F{stage}.{micro_batch}")
        yield

    @contextmanager
    def backward(self, stage: int, micro_batch: int, kind: Kind, last: bool) -> Iterator[None]:
        self.told.append(f"{kind.value}{stage}.{micro_batch}")
        if last:
            self.last.append(self.told[-1])
        yield

    def failed(self) -> None:
        self.failures += 1


def pipe(name: str, virtual: int) -> tuple[Executor, nn.Sequential, Listens]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    schedule = with_residency(make_schedule(name, 1, 3, virtual))
    where = cut(layer_sizes(layers_of(model)), schedule.num_stages)
    stages = split(model, where, schedule.stages_of(0)).stages
    owner = Listens()
    channel = Channel.open([0], Ledger(), 1.0)
    return Executor(schedule, stages, channel, loss=F.mse_loss, owner=owner), model, owner


@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("breadth_first", 2), ("zb_v", 2)]
)
def test_the_owner_hears_the_list_and_gradients_are_the_models(name, virtual):
    executor, model, owner = pipe(name, virtual)
    x, y = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    result = executor.run(split_batch(x, 3), split_batch(y, 3), scale=8.0)
    assert owner.told == [str(entry) for entry in executor.schedule.lists[0]]
    assert len(owner.last) == virtual and all(text[0] in "BW" for text in owner.last)
    for text in owner.last:
        after = owner.told[owner.told.index(text) + 1 :]
        assert f"G{text[1]}" in after
        assert not any(other[0] in "BIW" and other[1] == text[1] for other in after)
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    (loss * 8).backward()
    assert result.loss == pytest.approx(float(loss.detach()), abs=1e-15)
    for found, p in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(found, p.grad, rtol=0, atol=1e-13)


def test_a_divisor_of_ones_own_and_weights():
    executor, model, _ = pipe("1f1b", 1)
    x, y = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    result = executor.run(split_batch(x, 3), split_batch(y, 3), weights=[1, 2, 5], divisor=1.0)
    found = model[0].weight.grad.clone()
    model.zero_grad()
    losses = [F.mse_loss(model(a), b) for a, b in zip(x.chunk(3), y.chunk(3), strict=True)]
    total = losses[0] + 2 * losses[1] + 5 * losses[2]
    total.backward()
    assert torch.allclose(found, model[0].weight.grad, rtol=0, atol=1e-13)
    assert result.loss == pytest.approx(float(total.detach()) / 8, abs=1e-14)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"targets": None}, "needs the micro-batches' targets"),
        ({"inputs": [torch.ones(1, 4)] * 2}, "2 inputs were given for 3 micro-batches"),
        ({"weights": [1.0]}, "1 weights were given for 3 micro-batches"),
        ({"weights": [0.0] * 3}, "sum to 0.0"),
        ({"targets": [torch.ones(1, 4), None, None]}, "F0.1, stage 0"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(keys, words):
    executor, _, owner = pipe("1f1b", 1)
    parts = [torch.ones(1, 4, dtype=torch.float64)] * 3
    with pytest.raises(StageError) as error:
        executor.run(**{"inputs": parts, "targets": parts, **keys})
    assert words in str(error.value) and owner.failures == 1
    assert error.value.__cause__ is not None
    assert executor.run(parts, parts).loss is not None


def test_prediction_gives_outputs_and_validation_a_loss():
    executor, model, _ = pipe("interleaved", 2)
    x = torch.randn(5, 4, dtype=torch.float64)
    result = executor.evaluate(split_batch(x, 5), micro_batches=5)
    assert result.loss is None and result.outputs is not None
    assert torch.equal(torch.cat(result.outputs), torch.cat([model(part) for part in x.split(1)]))
    checked = executor.evaluate([x], [x], micro_batches=1)
    assert checked.outputs is None
    assert checked.loss == pytest.approx(float(F.mse_loss(model(x), x).detach()), abs=1e-15)
    assert all(p.grad is None for p in model.parameters())
