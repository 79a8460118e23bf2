"""Full-state checkpoints through the Trainer: what is in them, who can load them, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from strategy_lab import (
    Net,
    digest,
    distance,
    loader,
    rows,
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


def fit_and_save(strategy: Any, net: Any, folder: Path, batches: int = 3, **kwargs: Any) -> Path:
    run = trainer(strategy, **kwargs)
    run.fit(net, loader(batches))
    run.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


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
        "weights": same_tree(zero_file["state_dict"], ddp_file["state_dict"]),
        "optimizer": same_tree(zero_file["optimizer_states"], ddp_file["optimizer_states"]),
        "files": sorted(p.name for p in folder.rglob("*.ckpt")),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_the_one_ddp_writes(ranks: Any, stage: int) -> None:
    """Same names, order, values and optimizer state (by parameter number), bit for bit."""
    first, second = ranks(2)(contents, stage)
    assert first["mine"] == {"weights": 10, "state": 2}
    assert second["mine"] == {"weights": 0, "state": 0}
    for seen in (first, second):
        assert seen["order"] and seen["weights"] and seen["optimizer"]
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
    assert ranks(2)(crossing, first, second) == [0.0, 0.0]


class Fixed(DataLoader[Any]):
    """The same global batches at every number of ranks: 12 rows, 12 / ranks for each rank."""

    def __init__(self, batches: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        data = rows(12 * batches).view(batches, size, 12 // size, -1)[:, rank]
        super().__init__(data, batch_size=None)  # type: ignore[arg-type]


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
    """2 ranks, then 1 or 3, with the same global batches: as if nothing had happened, optimizer state included."""
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
    """Batches and learning rates of 4 + resumed steps are those of ten in a row (StepLR every 3 steps)."""
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
    """The optimizer's state is still there after fit and test."""
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


# --------------------------------------------------------------------------------- what loading may do


class Surgeon(Net):
    """Renames and changes the weights of a checkpoint while it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: torch.full_like(value, 2.0) if name == "gain" else value
            for name, value in state.items()
        }


def surgery(stage: int) -> tuple[list[float], float]:
    path = fit_and_save(zero(stage=stage), Net(), shared_folder("surgery"))
    net = Surgeon()
    run = trainer(zero(stage=stage))
    run.validate(net, loader(1), ckpt_path=path, verbose=False)
    saved = load(path)["state_dict"]
    away = (net.head.weight.detach() - saved["head.weight"]).abs().max()
    return net.gain.tolist(), float(away)


@pytest.mark.parametrize("stage", [1, 3])
def test_on_load_checkpoint_may_change_the_weights(ranks: Any, stage: int) -> None:
    assert ranks(2)(surgery, stage) == [([2.0] * 3, 0.0)] * 2


class Configured(Net):
    """Its hyper-parameters are what a Hydra project has."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Opaque:
    """Anything that is more than data."""


class Pickled(Net):
    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def hydra_settings() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"a": 1, "b": {"c": [1.5, "x", None], "d": "${a}"}, "e": True})


def resume_configured(weights_only: bool | None) -> Any:
    net = Configured(hydra_settings())
    path = fit_and_save(zero(stage=3), net, shared_folder("hydra"))
    again = Configured(hydra_settings())
    run = trainer(zero(stage=3), max_epochs=2)
    run.fit(again, loader(3), ckpt_path=path, weights_only=weights_only)
    return run.global_step, again.hparams["settings"]["b"]["d"]


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_hydra_hyper_parameters_are_loaded_without_pickle(
    ranks: Any, weights_only: bool | None
) -> None:
    assert ranks(2)(resume_configured, weights_only) == [(6, 1), (6, 1)]


def resume_pickled(weights_only: bool | None) -> int:
    path = fit_and_save(zero(stage=1), Pickled(Opaque()), shared_folder("pickle"))
    run = trainer(zero(stage=1), max_epochs=2)
    run.fit(Pickled(Opaque()), loader(3), ckpt_path=path, weights_only=weights_only)
    return int(run.global_step)


def test_other_objects_need_weights_only_false(ranks: Any) -> None:
    with pytest.raises(Exception, match=r"more than data: .*Opaque.*weights_only=False"):
        ranks(2)(resume_pickled, None)
    assert ranks(2)(resume_pickled, False) == [6, 6]


class Other(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.quite_another = nn.Linear(2, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Nothing."""


def nothing_matches() -> None:
    path = fit_and_save(zero(stage=1), Net(), shared_folder("other"))
    trainer(zero(stage=1)).validate(Other(), loader(1), ckpt_path=path)


def test_loading_nothing_is_an_error(ranks: Any) -> None:
    with pytest.raises(Exception, match="nothing would have been loaded"):
        ranks(2)(nothing_matches)


class TwoOptimizers(Net):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.count = count

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = [self.blocks.parameters(), [*self.head.parameters(), self.gain]]
        return [torch.optim.Adam(part, lr=1e-2) for part in parts[: self.count]]


def two_optimizers() -> float:
    folder = shared_folder("two")
    path = fit_and_save(zero(stage=3), TwoOptimizers(2), folder)
    resumed, whole = TwoOptimizers(2), TwoOptimizers(2)
    trainer(zero(stage=3), max_epochs=2).fit(resumed, loader(3), ckpt_path=path)
    trainer(zero(stage=3), max_epochs=2).fit(whole, loader(3))
    return distance(values(resumed), values(whole))


def one_of_two() -> None:
    path = fit_and_save(zero(stage=1), TwoOptimizers(2), shared_folder("one"))
    trainer(zero(stage=1), max_epochs=2).fit(TwoOptimizers(1), loader(3), ckpt_path=path)


def test_two_optimizers_are_resumed(ranks: Any) -> None:
    assert ranks(2)(two_optimizers) == [0.0, 0.0]


def test_another_number_of_optimizers_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="state of 2 optimizers"):
        ranks(2)(one_of_two)


class Filtering(Net):
    """Saves only what is not in the first block."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        kept = {name: value for name, value in whole.items() if not name.startswith("blocks.0")}
        return {**kept, "note": torch.tensor(7)}


def filtering(stage: int) -> Any:
    net = Filtering()
    path = fit_and_save(zero(stage=stage), net, shared_folder("filter"))
    saved = load(path)["state_dict"]
    return list(saved), bool(torch.equal(saved["head.weight"], net.head.weight.detach()))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_of_ones_own_decides_what_is_saved(ranks: Any, stage: int) -> None:
    for names, same in ranks(2)(filtering, stage):
        assert names == [
            "gain",
            "offset",
            "blocks.1.0.weight",
            "blocks.1.0.bias",
            "blocks.2.0.weight",
            "blocks.2.0.bias",
            "head.weight",
            "head.bias",
            "note",
        ]
        assert same


# --------------------------------------------------------------------------------- files


def unwritable() -> tuple[str, bool]:
    folder = shared_folder("full")
    run = trainer(zero(stage=2))
    run.fit(Net(), loader(1))
    (folder / "taken.ckpt").mkdir(exist_ok=True)
    try:
        run.save_checkpoint(folder / "taken.ckpt")
    except Exception as error:
        message = str(error)
    dist.barrier()  # both are here: nobody waited for the other
    return message, any(folder.rglob("*.tmp"))


def test_a_failed_write_is_every_ranks_error(ranks: Any) -> None:
    for message, left in ranks(2)(unwritable):
        assert "rank 0 could not write" in message
        assert "taken.ckpt is a directory" in message
        assert not left


def save_for_one_process(path: str) -> str:
    net = Configured(1)
    run = trainer(zero(stage=3))
    run.fit(net, loader(3))
    run.save_checkpoint(path)
    return digest(net)


def test_one_process_loads_it_with_plain_lightning(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    (expected, _) = ranks(2)(save_for_one_process, str(path))
    alone = Configured.load_from_checkpoint(path)
    assert digest(alone) == expected
    assert alone.hparams["settings"] == 1


def missing() -> None:
    trainer(zero(stage=1)).fit(Net(), loader(1), ckpt_path="no/such.ckpt")


def test_a_missing_checkpoint_is_named(ranks: Any) -> None:
    with pytest.raises(Exception, match=r"no checkpoint at /.*no/such\.ckpt"):
        ranks(2)(missing)
