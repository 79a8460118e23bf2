"""The data under a real Trainer: resuming, validation, and the same losses on 1 and 2 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from zeroexp.config import Config
from zeroexp.data.loader import Loaders
from zeroexp.models.loss import IGNORED
from zeroexp.strategies.data import TokenDataModule, data_for
from zeroexp.strategies.module import LanguageModule

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


def write_tokens(folder: Path) -> Path:
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(folder / "t.bin")
    return folder / "t.bin"


def config(tokens: Path, **keys: Any) -> Config:
    """Training of 225 sequences in batches of 48: 4 steps per epoch; 24 sequences of validation."""
    return Config.from_mapping(
        {
            "model.dim": 16,
            "model.layers": 1,
            "model.heads": 2,
            "model.vocab_size": 64,
            "optim.kind": "sgd",
            "optim.lr": 0.1,
            "data.kind": "memmap",
            "data.path": str(tokens),
            "data.seq_len": 16,
            "data.batch_size": 48,
            "data.val_fraction": 0.1,
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
    )


class Recorder(pl.Callback):
    """What each optimizer step read."""

    def __init__(self) -> None:
        self.steps: dict[int, list[list[int]]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.setdefault(trainer.global_step, []).extend(batch["tokens"].tolist())


def trainer(config: Config, folder: Path, steps: int, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )


class SaveAfter(pl.Callback):
    """Saves where ModelCheckpoint does: at the end of the batch that made step ``step``."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path, self.done = step, path, False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 4), (1, 4), (4, 1), (3, 2)])
def test_resumed_run_reads_and_learns_what_an_unbroken_one_does(
    tmp_path: Path, stop: int, before: int, after: int
) -> None:
    tokens = write_tokens(tmp_path)
    straight_config = config(tokens)
    straight, whole = Recorder(), LanguageModule(straight_config)
    trainer(straight_config, tmp_path, 10, straight).fit(
        whole, datamodule=TokenDataModule(straight_config)
    )

    first_config = config(tokens, trainer__accumulate_grad_batches=before)
    first, path = Recorder(), tmp_path / "saved.ckpt"
    run = trainer(first_config, tmp_path, stop + 1, first, SaveAfter(stop, path))
    run.fit(LanguageModule(first_config), datamodule=TokenDataModule(first_config))

    second_config = config(tokens, trainer__accumulate_grad_batches=after)
    second, module = Recorder(), LanguageModule(second_config)
    run = trainer(second_config, tmp_path, 10, second)
    run.fit(module, datamodule=TokenDataModule(second_config), ckpt_path=str(path))

    assert sorted(second.steps) == list(range(stop, 10))
    for step in range(10):
        read = (first if step < stop else second).steps[step]
        assert sorted(read) == sorted(straight.steps[step]), f"step {step}"
    for a, b in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_validation_loss_is_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """24 sequences in batches of 10: the tail of 6 is padding and must not count."""
    chosen = config(write_tokens(tmp_path), data__batch_size=10)
    module = LanguageModule(chosen)
    (result,) = trainer(chosen, tmp_path, 1).validate(
        module, datamodule=TokenDataModule(chosen), verbose=False
    )
    losses = []
    loader = Loaders(chosen).val()
    assert loader is not None
    sizes = [len(batch["tokens"]) for batch in loader]
    assert sizes == [10, 10, 10]
    for batch in loader:
        logp = torch.log_softmax(module(batch["tokens"]).double(), -1)
        for b, i in (batch["targets"] != IGNORED).nonzero().tolist():
            losses.append(-logp[b, i, batch["targets"][b, i]].item())
    assert len(losses) == 24 * 16
    assert result["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_test_and_predict_run(tmp_path: Path) -> None:
    chosen = config(write_tokens(tmp_path))
    module, data = LanguageModule(chosen), TokenDataModule(chosen)
    run = trainer(chosen, tmp_path, 1)
    (validated,) = run.validate(module, datamodule=data, verbose=False)
    (tested,) = run.test(module, datamodule=data, verbose=False)
    assert tested["test_loss"] == validated["val_loss"]
    predicted: Any = run.predict(module, datamodule=data)
    assert torch.cat(predicted).shape == (48, 16)  # one batch, half of it padding


def test_a_module_with_data_of_its_own_keeps_it(tmp_path: Path) -> None:
    class Own(pl.LightningModule):
        def train_dataloader(self) -> Any:
            return [torch.zeros(1)]

    chosen = config(write_tokens(tmp_path))
    assert data_for(Own(), chosen) is None
    assert isinstance(data_for(LanguageModule(chosen), chosen), TokenDataModule)


WORKER = """
import json, sys
import lightning.pytorch as pl, torch
from zeroexp.config import Config
from zeroexp.strategies.data import TokenDataModule
from zeroexp.strategies.module import LanguageModule

class Losses(pl.Callback):
    def __init__(self):
        self.values, self.sum, self.count = [], 0.0, 0
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        # Lightning hands over each micro-batch's loss divided by their number
        self.sum, self.count = self.sum + float(outputs["loss"]), self.count + 1
        if self.count == trainer.accumulate_grad_batches:
            mean = torch.tensor(self.sum, dtype=torch.float64)
            self.values.append(float(trainer.strategy.reduce(mean, reduce_op="mean")))
            self.sum, self.count = 0.0, 0

config = Config.from_mapping(json.loads(sys.argv[1]))
losses, module, data = Losses(), LanguageModule(config), TokenDataModule(config)
trainer = pl.Trainer(accelerator="cpu", devices=config.trainer.devices, max_steps=6,
    strategy="ddp_fork" if config.trainer.devices > 1 else "auto", callbacks=[losses],
    accumulate_grad_batches=config.trainer.accumulate_grad_batches, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    num_sanity_val_steps=0, val_check_interval=4 * config.trainer.accumulate_grad_batches,
    check_val_every_n_epoch=None, use_distributed_sampler=False, default_root_dir=sys.argv[2])

class Report(pl.Callback):
    def on_fit_end(self, trainer, module):
        if trainer.is_global_zero:
            out = {"losses": losses.values, "val": float(trainer.callback_metrics["val_loss"])}
            open(sys.argv[2] + "/out.json", "w").write(json.dumps(out))

trainer.callbacks.append(Report())
trainer.fit(module, datamodule=data)
"""


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_losses_agree_on_one_and_two_ranks_and_any_accumulation(tmp_path: Path) -> None:
    """Within 1e-5 relative in fp32, step by step and in validation (24 sequences, uneven tails)."""
    tokens = write_tokens(tmp_path)
    results = {}
    for ranks, accumulate in ((1, 1), (1, 3), (2, 1), (2, 4)):
        chosen = config(tokens, trainer__devices=ranks, trainer__accumulate_grad_batches=accumulate)
        out = tmp_path / f"{ranks}x{accumulate}"
        out.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", WORKER, json.dumps(chosen.to_dict()), str(out)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[ranks, accumulate] = json.loads((out / "out.json").read_text())
    alone = results[1, 1]
    assert len(alone["losses"]) == 6
    for cut, result in results.items():
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5), cut
        assert result["val"] == pytest.approx(alone["val"], rel=1e-5), cut
    assert alone["losses"][0] == pytest.approx(np.log(64), rel=0.02)
