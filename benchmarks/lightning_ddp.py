"""The module and data of a run under Lightning's own DDP strategy and its own launcher.

    python -m benchmarks.lightning_ddp RUN_DIR

RUN_DIR holds the ``config.yaml`` of a run; each rank leaves the moment at which its first step
ended in ``launch/rankN.json``, where a run of zeroexp leaves it too.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from zeroexp.config import Config
from zeroexp.strategies.data import TokenDataModule
from zeroexp.strategies.module import build_module


class FirstStep(Callback):
    """Writes down when the first step was over, in seconds since the epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            file = self.folder / f"rank{trainer.global_rank}.json"
            file.write_text(json.dumps({"first_step_at": time.time()}))


def main(run_directory: Path) -> None:
    warnings.simplefilter("ignore")
    text = (run_directory / "config.yaml").read_text(encoding="utf-8")
    config = Config.from_mapping(yaml.safe_load(text)).resolved()
    launch = run_directory / "launch"
    launch.mkdir(exist_ok=True)
    seed_everything(config.trainer.seed, workers=True, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=config.trainer.devices,
        strategy="ddp",
        max_steps=config.trainer.max_steps,
        accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        gradient_clip_val=config.trainer.gradient_clip_val or None,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[FirstStep(launch)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(build_module(config), TokenDataModule(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
