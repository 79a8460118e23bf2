"""Loading: what may change a checkpoint, what is refused, files, and models that are born
sharded."""

from __future__ import annotations

import inspect
import warnings
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
    fit_and_save,
    load,
    loader,
    shared_folder,
    trainer,
    values,
    zero,
)
from torch import Tensor, nn

# --------------------------------------------------------------------------------- what loading
# may do


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


needs_weights_only = pytest.mark.skipif(
    "weights_only" not in inspect.signature(pl.Trainer.fit).parameters,
    reason="this Lightning has no weights_only",
)


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


@needs_weights_only
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_hydra_hyper_parameters_are_loaded_without_pickle(
    ranks: Any, weights_only: bool | None
) -> None:
    """PL-16: resumed with nested settings and interpolations, and no pickle unless asked for."""
    assert ranks(2)(resume_configured, weights_only) == [(6, 1), (6, 1)]


def resume_pickled(weights_only: bool | None) -> int:
    path = fit_and_save(zero(stage=1), Pickled(Opaque()), shared_folder("pickle"))
    run = trainer(zero(stage=1), max_epochs=2)
    run.fit(Pickled(Opaque()), loader(3), ckpt_path=path, weights_only=weights_only)
    return int(run.global_step)


@needs_weights_only
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
    """PL-02: none of the file's names is one of the module's."""
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


def save_for_one_process(stage: int, path: str) -> str:
    net = Configured({"a": 1, "b": {"c": [1.5, "x", None]}})
    run = trainer(zero(stage=stage))
    run.fit(net, loader(3))
    run.save_checkpoint(path)
    return digest(net)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_process_loads_it_with_plain_lightning(ranks: Any, tmp_path: Path, stage: int) -> None:
    """PL-01, PL-20: a file, to the bit what was live at the end, with its hyper-parameters, which
    can be overridden (PL-16)."""
    path = tmp_path / "whole.ckpt"
    (expected, _) = ranks(2)(save_for_one_process, stage, str(path))
    assert path.is_file()
    alone = Configured.load_from_checkpoint(path)
    assert digest(alone) == expected
    assert alone.hparams["settings"] == {"a": 1, "b": {"c": [1.5, "x", None]}}
    other = Configured.load_from_checkpoint(path, settings=2)
    assert digest(other) == expected and other.hparams["settings"] == 2


def save_hydra_settings(path: str) -> str:
    net = Configured(hydra_settings())
    run = trainer(zero(stage=2))
    run.fit(net, loader(3))
    run.save_checkpoint(path)
    return digest(net)


def test_hydra_hyper_parameters_are_plain_in_the_file(ranks: Any, tmp_path: Path) -> None:
    """PL-16: nothing but data, interpolations resolved, for whoever has no zeroexp."""
    path = tmp_path / "hydra.ckpt"
    (expected, _) = ranks(2)(save_hydra_settings, str(path))
    plain = {"a": 1, "b": {"c": [1.5, "x", None], "d": 1}, "e": True}
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"settings": plain}
    alone = Configured.load_from_checkpoint(path)
    assert digest(alone) == expected and alone.hparams["settings"] == plain


class WithModule(Net):
    def __init__(self, layer: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = layer


def save_with_module(path: str) -> list[str]:
    net = WithModule(nn.Linear(2, 2))
    run = trainer(zero(stage=2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(net, loader(3))
        run.save_checkpoint(path)
    return [str(w.message) for w in said]


def test_a_module_is_no_hyper_parameter(ranks: Any, tmp_path: Path) -> None:
    """PL-16: skipped with a warning; the rest loads, with an override."""
    path = tmp_path / "module.ckpt"
    said = ranks(2)(save_with_module, str(path))[0]
    assert any("modules are not saved: layer" in line for line in said)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"lr": 0.1}
    alone = WithModule.load_from_checkpoint(path, layer=nn.Linear(2, 2), lr=0.5)
    assert alone.hparams["lr"] == 0.5


def missing() -> None:
    trainer(zero(stage=1)).fit(Net(), loader(1), ckpt_path="no/such.ckpt")


def test_a_missing_checkpoint_is_named(ranks: Any) -> None:
    with pytest.raises(Exception, match=r"no checkpoint at /.*no/such\.ckpt"):
        ranks(2)(missing)


# --------------------------------------------------------------------------------- born sharded


class Late(pl.LightningModule):
    """Builds its layers in ``configure_model``, where the strategy shards them as they are made."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.inner: Any = None
        self.born = 0

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = Net(self.seed)
            # A sharded block watches over its parameters: its table of them is no plain dict.
            self.born = sum(type(m._parameters) is not dict for m in self.inner.modules())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.inner.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def late(stage: int) -> Any:
    folder = shared_folder("late")
    path = fit_and_save(zero(stage=stage), Late(), folder, max_epochs=1)
    resumed, whole = Late(seed=5), Late()
    trainer(zero(stage=stage), max_epochs=2).fit(resumed, loader(3), ckpt_path=path)
    trainer("ddp", max_epochs=2).fit(whole, loader(3))
    alone = Late(seed=7)
    run = trainer(zero(stage=stage))
    loss = run.validate(alone, loader(2), ckpt_path=path, verbose=False)[0]["val"]
    reference = Late()
    expected = trainer("ddp").validate(reference, loader(2), ckpt_path=path, verbose=False)
    return (
        resumed.born,
        distance(values(resumed), values(whole)),
        loss - expected[0]["val"],
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_configure_model_builds_sharded_and_loads(ranks: Any, stage: int) -> None:
    for born, away, loss in ranks(2)(late, stage):
        assert (born > 0) == (stage == 3)
        assert away == 0.0
        assert loss == pytest.approx(0.0, abs=1e-7)


# --------------------------------------------------------------------------------- after a failure


class Fails(Net):
    fails = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def after_failure(stage: int) -> Any:
    folder = shared_folder("failed")
    path = fit_and_save(zero(stage=stage), Net(), folder)
    net = Fails()
    with pytest.raises(ValueError, match="boom"):
        trainer(zero(stage=stage)).fit(net, loader(3))
    net.fails = False
    try:
        trainer(zero(stage=stage)).fit(net, loader(3))
    except Exception as error:
        said = str(error)
    else:
        said = "trained"
    trainer(zero(stage=stage), max_epochs=2).fit(net, loader(3), ckpt_path=path)
    whole = Net()
    trainer(zero(stage=stage), max_epochs=2).fit(whole, loader(3))
    return said, distance(values(net), values(whole))


def test_parameters_that_a_failure_scattered_are_not_trained_on(ranks: Any) -> None:
    """No collective runs after an exception, so at stage 3 nothing is whole; a checkpoint heals
    it."""
    for said, away in ranks(2)(after_failure, 3):
        assert "they are gone: build the module again, or pass ckpt_path" in said
        assert away == 0.0
    for said, _ in ranks(2)(after_failure, 2):
        assert said == "trained"
