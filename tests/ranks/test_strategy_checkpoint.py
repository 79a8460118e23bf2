"""Full-state checkpoints through the Trainer: what is in them, who can load them, resuming, and
what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from strategy_lab import (
    Fixed,
    Net,
    distance,
    fit_and_save,
    load,
    loader,
    shared_folder,
    trainer,
    values,
    zero,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

STAGES = (0, 1, 2, 3)


def saving(folder: Path, **kwargs: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(dirpath=folder, filename="saved", **kwargs)


def same_tree(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(same_tree(a[key], b[key]) for key in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# --------------------------------------------------------------------------------- what is saved


class Saves(Net):
    """Saves in the middle of training, and looks at what each rank contributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: dict[str, int] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = {
            "weights": len(checkpoint["state_dict"]),
            "state": len(checkpoint["optimizer_states"][0]),
        }


def contents(stage: int) -> Any:
    folder = shared_folder("contents")
    ours, theirs = Saves(), Net()
    options: dict[str, Any] = {"enable_checkpointing": True}
    trainer(zero(stage=stage), callbacks=[saving(folder / "zero")], **options).fit(ours, loader(3))
    trainer("ddp", callbacks=[saving(folder / "ddp")], **options).fit(theirs, loader(3))
    dist.barrier()
    zero_file, ddp_file = load(folder / "zero/saved.ckpt"), load(folder / "ddp/saved.ckpt")
    return {
        "mine": ours.mine,
        "keys": sorted(set(zero_file) ^ set(ddp_file)),
        "order": list(zero_file["state_dict"]) == list(ddp_file["state_dict"]),
        "bare": list(zero_file["state_dict"]) == list(Net().state_dict()),
        "live": same_tree(zero_file["state_dict"], values(ours)),
        "weights": same_tree(zero_file["state_dict"], ddp_file["state_dict"]),
        "optimizer": same_tree(zero_file["optimizer_states"], ddp_file["optimizer_states"]),
        "files": sorted(p.name for p in folder.rglob("*.ckpt")),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_the_one_ddp_writes(ranks: Any, stage: int) -> None:
    """PL-02, PL-20: same names, order, values and optimizer state (by parameter number), bit for
    bit; the names are those of the bare module."""
    first, second = ranks(2)(contents, stage)
    assert first["mine"] == {"weights": 10, "state": 2}
    assert second["mine"] == {"weights": 0, "state": 0}
    for seen in (first, second):
        assert seen["order"] and seen["weights"] and seen["optimizer"]
        assert seen["bare"] and seen["live"]
        assert seen["keys"] == ["ZeroPrecision"]
        assert seen["files"] == ["saved.ckpt", "saved.ckpt"]


# --------------------------------------------------------------------------------- resume


def crossing(first: Any, second: Any) -> float:
    """Three steps with one strategy, three more with another; against six of DDP."""
    folder = shared_folder("crossing")
    make = {"zero1": lambda: zero(stage=1), "zero3": lambda: zero(stage=3), "ddp": lambda: "ddp"}
    path = fit_and_save(make[first](), Net(), folder, max_epochs=1)
    resumed, whole = Net(seed=5), Net()
    trainer(make[second](), max_epochs=2).fit(resumed, loader(3), ckpt_path=path)
    trainer("ddp", max_epochs=2).fit(whole, loader(3))
    return distance(values(resumed), values(whole))


@pytest.mark.parametrize(
    ("first", "second"),
    [("zero3", "ddp"), ("ddp", "zero3"), ("zero1", "zero3"), ("zero3", "zero1")],
)
def test_any_strategy_resumes_the_checkpoint_of_another(
    ranks: Any, first: str, second: str
) -> None:
    """PL-19: whoever saves and whoever loads, three steps later the weights are those of six in a
    row, which they cannot be without the moments."""
    assert ranks(2)(crossing, first, second) == [0.0, 0.0]


def part(stage: int, path: str, resume: bool, epochs: int) -> dict[str, Tensor]:
    net = Net(seed=0)
    run = trainer(zero(stage=stage), max_epochs=epochs, use_distributed_sampler=False)
    run.fit(net, Fixed(3), ckpt_path=path if resume else None)
    run.save_checkpoint(path)
    return values(net)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_resume_on_another_number_of_ranks(
    ranks: Any, tmp_path: Path, stage: int, size: int
) -> None:
    """PL-19: 2 ranks, then 1 or 3, with the same global batches: as if nothing had happened,
    optimizer state included."""
    path, whole = str(tmp_path / "part.ckpt"), str(tmp_path / "whole.ckpt")
    ranks(2)(part, stage, path, False, 1)
    resumed = ranks(size)(part, stage, path, True, 2)
    expected = ranks(2)(part, stage, whole, False, 2)
    for state in resumed:
        assert distance(state, expected[0]) <= 1e-6
    ours, theirs = load(Path(path)), load(Path(whole))
    states = ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"]
    assert states[0].keys() == states[1].keys()
    for number in states[0]:
        assert float(states[0][number]["step"]) == float(states[1][number]["step"]) == 6
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(states[0][number][name], states[1][number][name], atol=1e-6)


class Scheduled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log_of: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rate = self.optimizers().param_groups[0]["lr"]
        self.log_of.append((float(batch[0, 0]), rate))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Resumable(DataLoader[Any]):
    """Tells Lightning where it is, so that a run saved in mid-epoch goes on with the next batch."""

    def __init__(self, batches: int) -> None:
        super().__init__(Fixed(batches).dataset, batch_size=None)
        self.at = 0

    def __iter__(self) -> Any:
        for row in range(self.at, len(self.dataset)):  # type: ignore[arg-type]
            self.at = row + 1
            yield self.dataset[row]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def mid_epoch(stage: int) -> Any:
    folder = shared_folder("mid")
    options: dict[str, Any] = {"use_distributed_sampler": False}
    whole, before, after = Scheduled(), Scheduled(), Scheduled()
    trainer(zero(stage=stage), **options).fit(whole, Resumable(10))
    keep = saving(folder, every_n_train_steps=4, save_top_k=-1)
    run = trainer(
        zero(stage=stage), callbacks=[keep], enable_checkpointing=True, max_steps=4, **options
    )
    run.fit(before, Resumable(10))
    trainer(zero(stage=stage), **options).fit(after, Resumable(10), ckpt_path=folder / "saved.ckpt")
    return whole.log_of, before.log_of, after.log_of, distance(values(whole), values(after))


@pytest.mark.parametrize("stage", [1, 3])
def test_resume_in_mid_epoch_goes_on_exactly(ranks: Any, stage: int) -> None:
    """PL-13: batches and learning rates of 4 + resumed steps are those of ten in a row (StepLR
    every 3 steps), and so are the weights."""
    for whole, before, after, away in ranks(2)(mid_epoch, stage):
        assert len(before) == 4
        assert whole[:4] == before
        assert whole[4:] == after[-6:]
        rates = [rate for _, rate in whole]
        assert rates == pytest.approx([1e-2] * 3 + [1e-3] * 3 + [1e-4] * 3 + [1e-5])
        assert away == 0.0


def fit_test_save_resume(stage: int) -> float:
    folder = shared_folder("late")
    first, whole = Net(), Net()
    run = trainer(zero(stage=stage))
    run.fit(first, loader(2))
    run.test(first, loader(1), verbose=False)
    run.save_checkpoint(folder / "late.ckpt")
    resumed = Net(seed=3)
    trainer(zero(stage=stage), max_epochs=2).fit(resumed, loader(2), ckpt_path=folder / "late.ckpt")
    trainer(zero(stage=stage), max_epochs=2).fit(whole, loader(2))
    return distance(values(resumed), values(whole))


@pytest.mark.parametrize("stage", STAGES)
def test_fit_test_save_resume(ranks: Any, stage: int) -> None:
    """PL-08: the optimizer's state is still there after fit and test."""
    assert ranks(2)(fit_test_save_resume, stage) == [0.0, 0.0]


class Scaled(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.seen: list[tuple[float, int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bad = self.trainer.current_epoch == 0 and batch_idx == 1
        return self.layer(batch).pow(2).mean() * (float("inf") if bad else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        engine = self.trainer.strategy.engine
        self.seen.append((engine.loss_scale, engine.skipped_steps, engine.global_steps))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def loss_scale() -> Any:
    folder = shared_folder("scale")
    scale = {"init": 64.0, "interval": 3, "hysteresis": 1}
    config = {"zero": {"stage": 2}, "precision": {"compute": "fp16", "loss_scale": scale}}
    whole, resumed = Scaled(), Scaled()
    trainer(zero(config=config), max_epochs=2).fit(whole, loader(4))
    path = fit_and_save(zero(config=config), Scaled(), folder, batches=4)
    trainer(zero(config=config), max_epochs=2).fit(resumed, loader(4), ckpt_path=path)
    return whole.seen, resumed.seen


def test_loss_scale_and_counters_are_resumed(ranks: Any) -> None:
    for whole, resumed in ranks(2)(loss_scale):
        assert whole[3] == (32.0, 1, 4)
        assert resumed == whole[4:]
        assert resumed[-1][1:] == (1, 8)
