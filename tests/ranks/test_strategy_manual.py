"""Manual optimization, several optimizers, precision strings, schedules of skipped steps, callbacks that copy weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from strategy_lab import Net, distance, loader, trainer, values, zero
from torch import Tensor, nn
from torch.utils.data import DataLoader

# --------------------------------------------------------------------------------- two optimizers


class Duel(pl.LightningModule):
    """G(z) = g z, D(x) = d x; D's loss D(G(z)) - D(real), G's loss -D(G(z)); SGD, lr 0.1, z = 1, real = 2.

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
                # Without toggling, this also leaves gradients in the critic: zero_grad has to clear them.
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


# --------------------------------------------------------------------------------- own backward, frozen parts


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


# --------------------------------------------------------------------------------- precision


class Descending(Net):
    """SGD: a gradient that is off by a little moves a weight by a little (AdamW may turn its sign)."""

    def __init__(self) -> None:
        super().__init__(norm=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dtypes(Descending):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.blocks[0](batch)
        self.seen.update(
            batch=str(batch.dtype),
            weight=str(self.head.weight.dtype),
            buffer=str(self.offset.dtype),
            out=str(out.dtype),
            named=self.trainer.precision,
        )
        loss = super().training_step(batch, batch_idx)
        self.seen["loss"] = str(loss.dtype)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        engine = self.trainer.strategy.engine
        optim = engine.ledger.state_bytes()["optim"]
        self.seen["optim"] = sum(optim.values())
        self.seen["saved"] = {
            str(v.dtype) for v in self.trainer.strategy.lightning_module_state_dict().values()
        }


def dtypes(precision: str | None, config: dict[str, Any] | None, stage: int) -> Any:
    net, reference = Dtypes(), Descending()
    strategy = zero(config={"zero": {"stage": stage}, **(config or {})})
    trainer(strategy, precision=precision).fit(net, loader(3))
    trainer("ddp").fit(reference, loader(3))
    whole = {name: value.to(torch.float32) for name, value in values(net).items()}
    return (
        net.seen,
        distance(whole, values(reference)),
        {str(v.dtype) for v in values(net).values()},
    )


FP16 = {"precision": {"compute": "fp16", "loss_scale": {"init": 128.0}}}
CASES: list[Any] = [
    ("32-true", None, "float32", "float32", "float32", 1e-9),
    ("64-true", None, "float64", "float64", "float64", 1e-5),
    ("bf16-true", None, "bfloat16", "bfloat16", "bfloat16", 5e-2),
    ("bf16-mixed", None, "bfloat16", "float32", "float32", 2e-2),
    (None, FP16, "float16", "float32", "float32", 1e-2),
]


@pytest.mark.parametrize(("precision", "config", "weight", "batch", "buffer", "away"), CASES)
@pytest.mark.parametrize("stage", [1, 3])
def test_precision_strings(
    ranks: Any,
    precision: str | None,
    config: Any,
    weight: str,
    batch: str,
    buffer: str,
    away: float,
    stage: int,
) -> None:
    (seen, distance_, _), _ = ranks(2)(dtypes, precision, config, stage)
    assert seen["weight"] == f"torch.{weight}"
    assert seen["batch"] == f"torch.{batch}"
    assert seen["buffer"] == f"torch.{buffer}"
    assert seen["out"] == f"torch.{weight}"
    assert seen["named"] == (precision or "16-mixed")
    assert seen["saved"] == {"torch.float64" if weight == "float64" else "torch.float32"}
    assert 0 < distance_ + 1e-12 <= away
    if precision == "bf16-mixed":
        assert seen["loss"] == "torch.float32"


class Moments(Dtypes):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def masters(precision: str) -> int:
    net = Moments()
    trainer(zero(stage=1), precision=precision).fit(net, loader(3))
    return int(net.seen["optim"])


def test_mixed_keeps_fp32_masters_and_true_keeps_none(ranks: Any) -> None:
    """Per owned element: mixed 4 (master) + 8 (moments), bf16-true 4 (two bf16 moments)."""
    mixed, true = sum(ranks(2)(masters, "bf16-mixed")), sum(ranks(2)(masters, "bf16-true"))
    assert mixed == 3 * true


# --------------------------------------------------------------------------------- skipped steps


class Overflowing(pl.LightningModule):
    """fp16; the loss of the first three steps overflows. The schedule is linear warm-up over ten steps."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.interval = interval
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = float("inf") if batch_idx < 3 else 1.0
        return (self.weight * factor).sum() * 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.lr_schedulers().get_last_lr()[0])


def overflowing(stage: int, interval: str) -> Any:
    import warnings

    net = Overflowing(interval)
    config = {
        "zero": {"stage": stage},
        "precision": {"compute": "fp16", "loss_scale": {"init": 16.0, "hysteresis": 1}},
    }
    strategy = zero(config=config)
    seen = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen["skipped"] = strategy.engine.skipped_steps
            seen["scale"] = strategy.engine.loss_scale
            seen["kind"] = type(module.lr_schedulers()).__name__
            seen["state"] = sorted(module.lr_schedulers().state_dict())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = DataLoader(torch.zeros(14, 1), batch_size=1)  # type: ignore[arg-type]
        trainer(strategy, callbacks=[Look()]).fit(net, data)
    early = [w for w in caught if "lr_scheduler.step()` before" in str(w.message)]
    return (
        net.rates,
        seen,
        len(early),
        type(net.lr_schedulers()) is torch.optim.lr_scheduler.LambdaLR,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_schedule_waits_for_skipped_steps(ranks: Any, stage: int) -> None:
    for rates, seen, early, restored in ranks(2)(overflowing, stage, "step"):
        assert rates == pytest.approx([0, 0, 0, 0.01, 0.02, 0.03, 0.04])
        assert seen["skipped"] == 3
        assert seen["scale"] == 2.0  # 16, 8, 4, 2
        assert early == 0
        assert seen["kind"] == "LambdaLR"
        assert "step" not in seen["state"]
        assert restored


def test_a_schedule_by_epoch_is_not_held(ranks: Any) -> None:
    for rates, *_ in ranks(2)(overflowing, 1, "epoch"):
        assert rates[:6] == [0.0] * 6
        assert rates[6] == pytest.approx(0.01)


# --------------------------------------------------------------------------------- averaging callbacks


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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weight_averaging(ranks: Any, stage: int) -> None:
    """EMA of 1.0, 0.9, 0.8, 0.7, 0.6 with decay 0.5, starting at the first averaged weight (AveragedModel copies it)."""
    expected, average = [], None
    for weight in (0.9, 0.8, 0.7, 0.6):
        average = weight if average is None else 0.5 * average + 0.5 * weight
        expected.append(average)
    for seen, validated, final, plain in ranks(2)(ema, stage):
        assert seen == pytest.approx(expected, abs=1e-6)
        assert validated == pytest.approx([expected[1]] * 2 + [expected[3]] * 2, abs=1e-6)
        assert final == pytest.approx(expected[3], abs=1e-6)
        assert plain


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


def test_averaging_rounded_weights_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="WeightAveraging swaps parameters"):
        ranks(2)(averaging_in_bf16)


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
