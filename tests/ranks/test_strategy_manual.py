"""Manual optimization, several optimizers, an overridden backward, frozen parts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from strategy_lab import Net, distance, loader, trainer, values, zero
from torch import Tensor, nn

# --------------------------------------------------------------------------------- two optimizers


class Duel(pl.LightningModule):
    """G(z) = g z, D(x) = d x; D's loss D(G(z)) - D(real), G's loss -D(G(z)); SGD, lr 0.1, z = 1,
    real = 2.

    By hand: d = 1 + 0.1 (2 - g), then g = 1 + 0.1 d.
    """

    def __init__(self, toggle: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.generator = nn.Linear(1, 1, bias=False)
        self.critic = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.generator.weight)
        nn.init.ones_(self.critic.weight)
        self.trace: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        ones, twos = torch.ones(1, 1), torch.full((1, 1), 2.0)
        first, second = self.optimizers()
        for optimizer in (second, first):
            if self.toggle == "toggle":
                self.toggle_optimizer(optimizer)
            fake = self.generator(ones)
            if optimizer is second:
                loss = (self.critic(fake.detach()) - self.critic(twos)).sum()
            else:
                # Without toggling, this also leaves gradients in the critic: zero_grad has to
                # clear them.
                loss = -self.critic(fake).sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggle == "toggle":
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()  # on every rank
        if state:
            self.trace.append((float(state["critic.weight"]), float(state["generator.weight"])))


def duel(stage: int, toggle: str) -> Any:
    net = Duel(toggle)
    trainer(zero(stage=stage), limit_train_batches=3).fit(net, loader(3))
    return net.trace, all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("toggle", ["toggle", "plain"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_optimizers_take_turns(ranks: Any, stage: int, toggle: str) -> None:
    expected, d, g = [], 1.0, 1.0
    for _ in range(3):
        d = d + 0.1 * (2 - g)
        g = g + 0.1 * d
        expected.append((d, g))
    assert expected[0] == pytest.approx((1.1, 1.11))  # the case as it was reported
    (trace, trainable), *_ = ranks(2)(duel, stage, toggle)
    assert trace == [pytest.approx(pair, abs=1e-6) for pair in expected]
    assert trainable


class Accumulating(Net):
    """Two backward passes before a step, the first without synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch) / 2)
        if last:
            optimizer.step()


def accumulating(stage: int) -> float:
    manual, automatic = Accumulating(), Net()
    trainer(zero(stage=stage)).fit(manual, loader(4))
    trainer(zero(stage=stage), accumulate_grad_batches=2).fit(automatic, loader(4))
    return distance(values(manual), values(automatic))


@pytest.mark.parametrize("stage", [1, 3])
def test_manual_accumulation_equals_automatic(ranks: Any, stage: int) -> None:
    assert ranks(2)(accumulating, stage) == [0.0, 0.0]


# --------------------------------------------------------------------------------- own backward,
# frozen parts


class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


class NoBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


def own_backward(precision: str, stage: int) -> float:
    states = []
    for net in (OwnBackward(), Net()):
        trainer(zero(stage=stage, config=None), precision=precision).fit(net, loader(3))
        states.append(values(net))
    return distance(*states)


def test_an_overridden_backward_reaches_the_engine(ranks: Any) -> None:
    assert ranks(2)(own_backward, "32-true", 2) == [0.0, 0.0]


def no_backward() -> None:
    trainer(zero(stage=2)).fit(NoBackward(), loader(1))


def test_a_backward_of_something_else_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match=r"did not call backward\(\) on the loss"):
        ranks(2)(no_backward)


class PartlyFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        slow = [p for p in self.blocks.parameters() if p.requires_grad]
        fast = [*self.head.parameters(), self.gain]
        return torch.optim.SGD(
            [{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-1, "momentum": 0.9}], lr=1.0
        )


def frozen(stage: int) -> tuple[float, bool]:
    ours, theirs = PartlyFrozen(), PartlyFrozen()
    before = values(ours.blocks[1])
    trainer(zero(stage=stage)).fit(ours, loader(4))
    trainer("ddp").fit(theirs, loader(4))
    same = distance(values(ours.blocks[1]), before) == 0.0
    return distance(values(ours), values(theirs)), same


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parts_and_parameter_groups(ranks: Any, stage: int) -> None:
    for away, same in ranks(2)(frozen, stage):
        assert away <= 1e-6
        assert same
