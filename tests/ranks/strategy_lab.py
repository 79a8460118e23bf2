"""Models and trainers for the tests of the Lightning strategy, on the ranks of the pool."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroexp.strategies import strategy_class

WIDTH = 8


def become_elastic() -> None:
    """Let Lightning see ranks that exist already, as under torchrun (the pool restores
    os.environ)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        TORCHELASTIC_RUN_ID="pool",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def zero(**kwargs: Any) -> Any:
    return strategy_class("lightning.pytorch")(**kwargs)


def trainer(strategy: Any, **kwargs: Any) -> Any:
    """A quiet Trainer on the ranks of the pool; nothing is written unless a test asks for it."""
    become_elastic()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "default_root_dir": tempfile.gettempdir(),
    }
    options = {**quiet, **kwargs}
    return pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options
    )


def shared_folder(name: str) -> Path:
    """A folder that all ranks of this call know; rank 0's choice."""
    box = [tempfile.mkdtemp(prefix=f"{name}-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, 0)
    return Path(box[0])


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loader(batches: int, per_batch: int = 2, seed: int = 1, **kwargs: Any) -> DataLoader[Any]:
    """``batches`` batches for each rank."""
    count = batches * per_batch * dist.get_world_size()
    return DataLoader(rows(count, seed), batch_size=per_batch, **kwargs)  # type: ignore[arg-type]


class Fixed(DataLoader[Any]):
    """The same global batches at every number of ranks: 12 rows, 12 / ranks for each rank."""

    def __init__(self, batches: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        data = rows(12 * batches).view(batches, size, 12 // size, -1)[:, rank]
        super().__init__(data, batch_size=None)  # type: ignore[arg-type]


class Net(pl.LightningModule):
    """Blocks, a head, a parameter of the root itself, a buffer."""

    def __init__(self, seed: int = 0, lr: float = 1e-2, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kinds = [nn.LayerNorm(WIDTH)] if norm else []
        self.blocks = nn.ModuleList(
            nn.Sequential(*kinds, nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.arange(3.0))
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain + self.offset

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def digest(module: nn.Module) -> str:
    """Hex digits that are equal exactly when all parameters and buffers are equal bit for bit."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(name.encode())
        total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference over all entries of two states with the same names."""
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def fit_and_save(strategy: Any, net: Any, folder: Path, batches: int = 3, **kwargs: Any) -> Path:
    run = trainer(strategy, **kwargs)
    run.fit(net, loader(batches))
    run.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found
