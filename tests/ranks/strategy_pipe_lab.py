"""LightningModules that are trained in a pipe on the ranks of the pool, and by one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from strategy_lab import WIDTH, trainer, values, zero
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL = 8
"""Samples of a batch of all data ranks together."""


def blocks(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return [*hidden, nn.Linear(WIDTH, 3)]


class Layers(nn.Module):
    """A model of one's own that offers its layers; two tensors go from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        *hidden, self.head = (made.double() for made in blocks())
        self.hidden = nn.ModuleList(hidden)

    def pipeline_layers(self) -> Iterator[tuple[str, nn.Module]]:
        yield "enter", Enter()
        for number, block in enumerate(self.hidden):
            yield f"hidden.{number}", Residual(block)
        yield "head", Head(self.head)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = start = batch["x"]
        for block in self.hidden:
            x = block(x) + 0.1 * start
        return self.head(x)


class Enter(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return batch["x"], batch["x"]


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, start = given
        return self.block(x) + 0.1 * start, start


class Head(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(given[0])


class Regressor(pl.LightningModule):
    """Learns 3 numbers from 8, and logs what people log. Batches are pairs."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(*blocks()).double()

    def taken(self, batch: Any) -> tuple[Any, Tensor]:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = self.taken(batch)
        count = float(len(y))
        self.log("samples", count, reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        loss = F.mse_loss(self.model(x), y)
        self.log("train_loss", loss, True, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"half": loss / 2, "worst": loss}, sync_dist=True)
        return {"loss": loss, "third": loss.detach() / 3}

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch), sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluated("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluated("test_loss", batch)

    def _evaluated(self, name: str, batch: Any) -> None:
        x, y = self.taken(batch)
        self.log(name, F.mse_loss(self.model(x), y), sync_dist=True, batch_size=len(y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(self.taken(batch)[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class DictRegressor(Regressor):
    """The same of a model with :func:`pipeline_layers`; batches are dicts with a name in them."""

    def __init__(self) -> None:
        super().__init__(Layers())

    def taken(self, batch: Any) -> tuple[Any, Tensor]:
        return {"x": batch["x"]}, batch["y"]


KINDS = {"sequential": lambda: Regressor(nn.Sequential(*blocks()).double()),
         "configured": Regressor, "layers": DictRegressor}  # fmt: skip


def named(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    return {"x": x, "y": y, "name": "made up"}


def batches(kind: str, count: int, seed: int = 1, *, readers: int | None = None) -> DataLoader[Any]:
    """``count`` global batches in order (Lightning's own sampler would shuffle them), dealt out to
    ``readers``: by default one for each pipe."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count * GLOBAL, WIDTH, generator=draw, dtype=torch.float64)
    y = x[:, :3].sin() + x[:, 3:6] * 0.3
    collate = named if kind == "layers" else None
    readers = readers or data_ranks()
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = TensorDataset(x, y)
    sampler: Any = DistributedSampler(data, readers, rank % readers, shuffle=False)
    return DataLoader(data, batch_size=GLOBAL // readers, sampler=sampler, collate_fn=collate)


def data_ranks() -> int:
    return dist.get_world_size() // 2 if dist.is_initialized() else 1


def run_of(stage: int | None, keys: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A Trainer in fp64: with a pipeline of two ranks, or (``stage`` None) of one process."""
    kwargs = {"precision": "64-true", **kwargs}
    if stage is not None:
        keys = {"schedule": "1f1b", "stages": 2, "micro_batches": 4, **(keys or {})}
        return trainer(zero(stage=stage, pipeline=keys), **kwargs)
    if dist.is_initialized():
        return trainer(zero(stage=3), **kwargs)
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tempfile.gettempdir(),
    }
    return pl.Trainer(accelerator="cpu", devices=1, **{**quiet, **kwargs})


class Watch(pl.Callback):
    """What a callback sees after each batch and each validation."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []
        self.outputs: list[dict[str, float]] = []
        self.validations: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(numbers(trainer.callback_metrics))
        self.outputs.append(numbers(outputs))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val_loss"]))


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


@dataclass
class Story:
    """What one rank has seen of a run with everything in it."""

    state: dict[str, Tensor]
    watch: Watch
    metrics: dict[str, float]
    logged: dict[str, float]
    epochs: int
    steps: int
    best: tuple[str, float]
    rates: list[float]
    tested: list[Any]
    predicted: list[Any]
    extra: dict[str, Any] = field(default_factory=dict)


def story(
    kind: str, stage: int | None, folder: Path, threshold: float, keys: dict[str, Any] | None = None
) -> Story:
    """Four epochs at most of three batches, two of which make a step; then test and predict."""
    torch.set_default_dtype(torch.float64)  # Lightning keeps metrics in it
    try:
        return _story(kind, stage, folder, threshold, keys)
    finally:
        torch.set_default_dtype(torch.float32)


def _story(
    kind: str, stage: int | None, folder: Path, threshold: float, keys: dict[str, Any] | None
) -> Story:
    net, watch = KINDS[kind](), Watch()
    keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}-{val_loss:.6f}", monitor="val_loss")
    stop = pl.callbacks.EarlyStopping(
        "val_loss", patience=9, stopping_threshold=threshold, check_on_train_epoch_end=False
    )
    run = run_of(
        stage,
        keys,
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[watch, stop, keep],
        enable_checkpointing=True,
    )
    run.fit(net, batches(kind, 3), batches(kind, 2, seed=2))
    rates = [float(group["lr"]) for group in run.optimizers[0].param_groups]
    found = Story(
        values(net),
        watch,
        numbers(run.callback_metrics),
        numbers(run.logged_metrics),
        run.current_epoch,
        run.global_step,
        (Path(keep.best_model_path).name, float(keep.best_model_score)),
        rates,
        [],
        [],
    )
    found.tested = run.test(net, batches(kind, 2, seed=3), verbose=False)
    found.predicted = run.predict(net, batches(kind, 1, seed=4))
    return found
