"""Precision strings, master weights, and schedules that wait for skipped steps."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from strategy_lab import WIDTH, Net, distance, loader, trainer, values, zero
from torch import Tensor, nn
from torch.utils.data import DataLoader

# --------------------------------------------------------------------------------- precision


class Descending(Net):
    """SGD: a gradient that is off by a little moves a weight by a little (AdamW may turn its
    sign)."""

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
    """fp16; the loss of the first three steps overflows. The schedule is linear warm-up over ten
    steps."""

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


def batch_norm(precision: str) -> str:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.normal = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.normal(x))

    net = Normed()
    trainer(zero(stage=2), precision=precision).fit(net, loader(2))
    return str(net.normal.running_mean.dtype)


def test_batch_norm_in_mixed_precision_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="normal is a BatchNorm1d: its running statistics"):
        ranks(2)(batch_norm, "bf16-mixed")
    assert ranks(2)(batch_norm, "32-true") == ["torch.float32"] * 2
    assert ranks(2)(batch_norm, "bf16-true") == ["torch.bfloat16"] * 2
