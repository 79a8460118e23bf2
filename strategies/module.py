"""The LightningModule that a run trains: around a built-in model, or the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from zeroexp.config import Config
from zeroexp.config.sections import ModelConfig
from zeroexp.data.dataset import Batch
from zeroexp.errors import ConfigError, Problem
from zeroexp.models.build import build, seeded
from zeroexp.models.loss import next_token_loss, num_targets
from zeroexp.models.specs import is_built_in
from zeroexp.moe import auxiliary_loss
from zeroexp.optim.build import build as build_optimizer
from zeroexp.optim.schedules import schedule

_RANDOM = "random_state"


class LanguageModule(pl.LightningModule):
    """A built-in model with its loss, optimizer and schedule.

    The model is made in ``configure_model``, inside whatever context the strategy gives (parameters
    may be born sharded there), with weights that follow from ``trainer.seed`` alone. Batches are
    :class:`zeroexp.data.dataset.Batch`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model: nn.Module | None = None
        self._val_sums = torch.zeros(2, dtype=torch.float64)  # summed loss, targets
        self._random: Tensor | None = None  # of the checkpoint that is resumed
        if config.pipeline.is_on:  # what one micro-batch costs is measured with it
            samples = config.micro_batch_size // config.num_micro_batches
            self.example_input_array = torch.zeros(samples, config.data.seq_len, dtype=torch.int64)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(
                self.config.model,
                self.config.moe,
                seed=self.config.trainer.seed,
                recompute=self.config.recompute.kind == "full",
            )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, L, V), or with ``targets`` the mean loss in nats."""
        if self.model is None:
            self.configure_model()
        assert self.model is not None  # for the type checker: configure_model made it
        logits_BLV: Tensor = self.model(tokens)
        return logits_BLV if targets is None else next_token_loss(logits_BLV, targets)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """The mean loss in nats. With experts, under ``loss`` what is trained for, under
        ``task_loss`` that mean, and under ``auxiliary_loss`` what the gates add to it."""
        loss = next_token_loss(self(batch["tokens"]), batch["targets"])
        if self.config.moe.kind == "none":
            return loss
        assert self.model is not None  # for the type checker: it has just been called
        added = auxiliary_loss(self.model)
        return {
            "loss": loss + added,
            "task_loss": loss.detach(),
            "auxiliary_loss": added.detach(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Ranks have the same state: each of them mixes its own number into what it draws.
        checkpoint[_RANDOM] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(_RANDOM)
        self._random = None if state is None else state.clone()

    def on_train_start(self) -> None:
        # Not earlier: building and sharding the model may draw.
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None

    def on_validation_epoch_start(self) -> None:
        self._val_sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        count = num_targets(batch["targets"])
        loss = next_token_loss(self(batch["tokens"]), batch["targets"])
        self._val_sums += torch.stack((loss.double() * count, count.double()))

    def on_validation_epoch_end(self) -> None:
        self._log_mean("val_loss")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_mean("test_loss")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next token after every position: (B, L) int64."""
        logits_BLV: Tensor = self(batch["tokens"])
        return logits_BLV.argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.config.optim, self.named_parameters())
        steps = self.config.trainer.max_steps
        if steps <= 0:  # the run ends by epochs
            steps = int(self.trainer.estimated_stepping_batches)
        scheduler = schedule(self.config.schedule, optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _log_mean(self, name: str) -> None:
        """Log the mean over all targets of all ranks.

        Lightning's own mean over ranks rounds the number of targets per rank down to whole numbers.
        """
        sums = self.trainer.strategy.reduce(self._val_sums, reduce_op="sum")
        assert isinstance(sums, Tensor)
        value = (sums[0] / sums[1].clamp(min=1)).float()
        self.log(name, value, prog_bar=True, sync_dist=True, batch_size=1)


def build_module(config: Config) -> pl.LightningModule:
    """The LightningModule of ``config.model``.

    Raises :class:`ConfigError` where an external one cannot be imported, is no LightningModule, or
    does not take ``model.kwargs``.
    """
    if is_built_in(config.model):
        return LanguageModule(config)
    factory = import_target(config.model.target)
    check_kwargs(factory, config.model)
    with seeded(config.trainer.seed):
        module = factory(**config.model.kwargs)
    if not isinstance(module, pl.LightningModule):
        raise _problem("model.target", f"{config.model.target} made {_described(module)}.", _BASE)
    return module


_BASE = "It must be a class derived from lightning.pytorch.LightningModule"


def import_target(target: str | None) -> Any:
    """The class or function at ``package.module:Name``.

    Raises :class:`ConfigError`: nothing there, an error while importing, or a class that is no
    LightningModule.
    """
    module_name, colon, name = (target or "").partition(":")
    if not (module_name and colon and name):
        raise _problem(
            "model.target",
            f"{target!r} is no import path." if target else "is not set.",
            "Write model.target=package.module:Class",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed_import(module_name, error) from error
        raise _problem(
            "model.target",
            f"there is no module {error.name!r} on Python's path.",
            "Start the command in the folder that holds it, or install it",
        ) from error
    except Exception as error:
        raise _failed_import(module_name, error) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"Did you mean {near[0]}?" if near else "Check the name after the colon"
            raise _problem("model.target", f"{module_name} has no {name!r}.", hint)
        found = getattr(found, part)
    if not callable(found) or (
        isinstance(found, type) and not issubclass(found, pl.LightningModule)
    ):
        raise _problem("model.target", f"{target} is {_described(found)}.", _BASE)
    return found


def check_kwargs(factory: Any, model: ModelConfig) -> None:
    """Raises :class:`ConfigError` if ``factory`` cannot be called with ``model.kwargs``."""
    try:
        inspect.signature(factory).bind(**model.kwargs)
    except ValueError:
        return  # written in C, without a signature: the call itself will tell
    except TypeError as error:
        if not isinstance(factory, type):
            raise _problem(
                "model.target",
                f"{model.target} is a function, no LightningModule, and model.kwargs cannot call "
                f"it: {error}.",
                f"{_BASE}, or a function that makes one. It takes {inspect.signature(factory)}",
            ) from error
        raise _problem(
            "model.kwargs",
            f"{model.target} cannot be called with {sorted(model.kwargs)}: {error}.",
            f"It takes {inspect.signature(factory)}",
        ) from error


def _described(found: object) -> str:
    """What ``found`` is, for a message that says it is not a LightningModule."""
    cls = found if isinstance(found, type) else type(found)
    other = getattr(sys.modules.get("pytorch_lightning"), "LightningModule", None)
    if other is not None and issubclass(cls, other):
        return (
            "a LightningModule of pytorch_lightning, another class than that of lightning.pytorch"
        )
    what = "the class" if isinstance(found, type) else "an object of"
    return f"{what} {cls.__module__}.{cls.__qualname__}, no LightningModule"


def _failed_import(module: str, error: BaseException) -> ConfigError:
    return _problem(
        "model.target",
        f"importing {module} failed with {type(error).__name__}: {error}.",
        f"Try  python -c 'import {module}'",
    )


def _problem(key: str, problem: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key, problem, fix)])
