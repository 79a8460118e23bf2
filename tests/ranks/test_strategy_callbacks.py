"""Callbacks that read, swap or add parameters, and compiled parts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from strategy_lab import (
    Fixed,
    Net,
    distance,
    load,
    loader,
    rows,
    shared_folder,
    trainer,
    values,
    zero,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

# --------------------------------------------------------------------------------- averaging
# callbacks


needs_averaging = pytest.mark.skipif(
    not hasattr(pl.callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging"
)


class Falling(pl.LightningModule):
    """w falls by 0.1 in every step: 1.0, 0.9, 0.8, …"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.validated: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(float(self.layer(torch.ones(1, 1))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ema(stage: int) -> Any:
    from lightning.pytorch.callbacks import WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    seen: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(float(average._average_model.module.layer.weight))

    net = Falling()
    data = DataLoader(torch.zeros(4, 1), batch_size=1)  # type: ignore[arg-type]
    run = trainer(
        zero(stage=stage), callbacks=[average, Look()], num_sanity_val_steps=0, max_epochs=2
    )
    run.fit(net, data, data)
    plain = type(average) is WeightAveraging
    return seen, net.validated, float(net.layer.weight), plain


@needs_averaging
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weight_averaging(ranks: Any, stage: int) -> None:
    """PL-14: EMA of 1.0, 0.9, 0.8, 0.7, 0.6 with decay 0.5, starting at the first averaged weight
    (AveragedModel copies it; the case's own numbers start one step earlier)."""
    expected, average = [], None
    for weight in (0.9, 0.8, 0.7, 0.6):
        average = weight if average is None else 0.5 * average + 0.5 * weight
        expected.append(average)
    for seen, validated, final, plain in ranks(2)(ema, stage):
        assert seen == pytest.approx(expected, abs=1e-6)
        assert validated == pytest.approx([expected[1]] * 2 + [expected[3]] * 2, abs=1e-6)
        assert final == pytest.approx(expected[3], abs=1e-6)
        assert plain


def ema_resumed(stage: int) -> Any:
    from lightning.pytorch.callbacks import WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    def averaged() -> Any:
        return WeightAveraging(avg_fn=get_ema_avg_fn(0.5))

    folder, data = shared_folder("ema"), DataLoader(torch.zeros(4, 1), batch_size=1)  # type: ignore[arg-type]
    first, whole, resumed = Falling(), Falling(), Falling()
    keep = pl.callbacks.ModelCheckpoint(folder, "saved", save_on_train_epoch_end=True)
    run = trainer(zero(stage=stage), callbacks=[averaged(), keep], enable_checkpointing=True)
    run.fit(first, data)
    trainer(zero(stage=stage), callbacks=[averaged()], max_epochs=2).fit(whole, data)
    trainer(zero(stage=stage), callbacks=[averaged()], max_epochs=2).fit(
        resumed, data, ckpt_path=folder / "saved.ckpt"
    )
    saved = load(folder / "saved.ckpt")
    return [
        float(saved["state_dict"]["layer.weight"]),
        float(saved["current_model_state"]["layer.weight"]),
        float(whole.layer.weight.detach()),
        float(resumed.layer.weight.detach()),
    ]


@needs_averaging
@pytest.mark.parametrize("stage", [1, 3])
def test_weight_averaging_is_resumed(ranks: Any, stage: int) -> None:
    """PL-14: two steps, a checkpoint, two more: the average goes on where it was."""
    for average, current, whole, resumed in ranks(2)(ema_resumed, stage):
        assert average == pytest.approx(0.5 * 0.9 + 0.5 * 0.8)
        assert current == pytest.approx(0.8)
        assert resumed == pytest.approx(whole, abs=1e-7)


def swa(stage: int) -> float:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    states = []
    for strategy in (zero(stage=stage), "ddp"):
        net = Net()
        callback = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
        trainer(strategy, callbacks=[callback], max_epochs=4).fit(net, loader(2))
        states.append(values(net))
    return distance(*states)


@pytest.mark.parametrize("stage", [1, 3])
def test_stochastic_weight_averaging_equals_ddp(ranks: Any, stage: int) -> None:
    assert max(ranks(2)(swa, stage)) <= 1e-6


def averaging_in_bf16() -> None:
    from lightning.pytorch.callbacks import WeightAveraging

    trainer(zero(stage=1), precision="bf16-mixed", callbacks=[WeightAveraging()]).fit(
        Net(), loader(1)
    )


@needs_averaging
def test_averaging_rounded_weights_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="WeightAveraging swaps parameters"):
        ranks(2)(averaging_in_bf16)


# --------------------------------------------------------------------------------- learning rate
# finder


def found(stage: int) -> Any:
    from lightning.pytorch.tuner import Tuner

    net, start = Net(lr=1e-3), values(Net())
    folder = shared_folder("tuned")
    run = trainer(zero(stage=stage), default_root_dir=folder)
    result = Tuner(run).lr_find(net, loader(40), num_training=30)
    away = distance(values(net), start)
    run.fit(net, loader(2))
    return result.suggestion(), away, net.lr, distance(values(net), start)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_learning_rate_finder_works(ranks: Any, stage: int) -> None:
    """It saves, trains, puts everything back, and both ranks come to one rate."""
    (first, away, rate, moved), (second, _, other, _) = ranks(2)(found, stage)
    assert first == second == rate == other
    assert away == 0.0
    assert moved > 0


# --------------------------------------------------------------------------------- compile


class CompiledInside(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")


def compiled_inside(stage: int) -> float:
    ours, theirs = CompiledInside(), Net()
    trainer(zero(stage=stage)).fit(ours, loader(3))
    trainer(zero(stage=stage)).fit(theirs, loader(3))
    return distance(values(ours), values(theirs))


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_train(ranks: Any, stage: int) -> None:
    assert max(ranks(2)(compiled_inside, stage)) <= 1e-6


# --------------------------------------------------------------------------------- finetuning


class Thaws(pl.callbacks.BaseFinetuning):
    """Freezes the blocks, and gives them to the optimizer in the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks, optimizer, lr=1e-3)


class Trainable(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def thawed_by_hand(epochs: int, batches: int) -> dict[str, Tensor]:
    """The same in one process over the global batches. (DDP does not reduce what was frozen when
    it was built.)"""
    net = Net()
    optimizer = torch.optim.AdamW([*net.head.parameters(), net.gain], lr=1e-2)
    for epoch in range(epochs):
        if epoch == 1:
            optimizer.add_param_group({"params": list(net.blocks.parameters()), "lr": 1e-3})
        for batch in rows(12 * batches).split(12):
            optimizer.zero_grad()
            net.loss(batch).backward()
            optimizer.step()
    return values(net)


def finetuning(stage: int) -> tuple[float, float, int]:
    net = Trainable()
    start = values(net.blocks)
    options: dict[str, Any] = {"max_epochs": 3, "use_distributed_sampler": False}
    run = trainer(zero(stage=stage), callbacks=[Thaws()], **options)
    run.fit(net, Fixed(2))
    groups = len(run.optimizers[0].param_groups)
    away = distance(values(net), thawed_by_hand(3, 2))
    return away, distance(values(net.blocks), start), groups


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_finetuning_adds_parameters(ranks: Any, stage: int) -> None:
    for away, moved, groups in ranks(2)(finetuning, stage):
        assert away <= 1e-6
        assert moved > 1e-3
        assert groups == 2


def compiled_with_hooks(stage: int) -> float:
    ours, theirs = Net(), Net()
    ours.blocks[1].compile(backend="aot_eager")
    trainer(zero(stage=stage)).fit(ours, loader(3))
    trainer(zero(stage=stage)).fit(theirs, loader(3))
    return distance(values(ours), values(theirs))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_compiled_with_its_hooks_trains(ranks: Any, stage: int) -> None:
    """``module.compile()`` traces the hooks as well: what gathers must stay out of the graph."""
    assert max(ranks(2)(compiled_with_hooks, stage)) <= 1e-6


class Wrapped(Net):
    """torch.compile(module) as a child: the parameters get names of their own, the numbers stay."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.blocks[number] = torch.compile(self.blocks[number], backend="aot_eager")


def wrapped(stage: int) -> float:
    ours, theirs = Wrapped(), Net()
    trainer(zero(stage=stage)).fit(ours, loader(3))
    trainer(zero(stage=stage)).fit(theirs, loader(3))
    plain = {name.replace("._orig_mod", ""): value for name, value in values(ours).items()}
    return distance(plain, values(theirs))


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_children_train(ranks: Any, stage: int) -> None:
    assert max(ranks(2)(wrapped, stage)) <= 1e-6
