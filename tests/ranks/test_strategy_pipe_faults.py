"""What a LightningModule cannot do in a pipe is said on every rank, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from strategy_pipe_lab import Regressor, batches, blocks, run_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zeroexp.errors import ConfigError, ModelError, StageError
from zeroexp.strategies.fabric import fabric_strategy_class


def model() -> nn.Sequential:
    return nn.Sequential(*blocks()).double()


class Own(Regressor):
    def __init__(self) -> None:
        super().__init__(model())


class Twice(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.model(batch[0]) + self.model(batch[0])).mean()


class TwoArguments(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0], batch[1]).mean()


class NotCalled(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].mean()


class Raises(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(batch[0])
        raise KeyError(f"no label for {tuple(out.shape)}")


class RaisesInValidation(Own):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])
        raise OSError("the table of words is gone")


class NoLoss(Own):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])


class LossOfMany(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


class LogsAList(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(batch[0])
        self.log("all", out)
        return out.mean()


class OwnReduction(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).mean()
        self.log("odd", loss, reduce_fx=lambda values: values[0])
        return loss


class CalledOutside(Own):
    def on_train_start(self) -> None:
        self.model(torch.zeros(1, 8).double())


class Manual(Own):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Own):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class OwnState(Own):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


class Loose(Own):
    """Not all parameters are in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Unequal(Own):
    """Ranks shuffle by themselves."""

    def train_dataloader(self) -> Any:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(dist.get_rank()))
        data = TensorDataset(torch.arange(64.0).view(8, 8).double()[order], torch.ones(8, 3))
        return DataLoader(data, batch_size=4)


IN_STEP: list[tuple[type[Own], list[str]]] = [
    (Twice, ["rank 1, F1.0, stage 1: ModelError: training_step calls Sequential twice"]),
    (TwoArguments, ["rank 0, F0.0, stage 0: ModelError", "2 arguments"]),
    (NotCalled, ["rank 0, F0.0, stage 0: ModelError: training_step did not call Sequential"]),
    (Raises, ["rank 1, F1.0, stage 1: KeyError", "no label for (2, 3)"]),
    (NoLoss, ["rank 1, F1.0, stage 1", "training_step returned a loss of NoneType"]),
    (LossOfMany, ["rank 1, F1.0, stage 1", "training_step returned a loss of shape [2, 3]"]),
    (LogsAList, ["rank 1, F1.0, stage 1", "self.log('all', ...) of a Tensor", "only numbers"]),
    (OwnReduction, ["rank 1, F1.0, stage 1", "self.log('odd', reduce_fx=...)"]),
    (RaisesInValidation, ["rank 1, F1.0, stage 1: OSError: the table of words is gone"]),
]
BEFORE: list[tuple[type[Own], list[str]]] = [
    (CalledOutside, ["Sequential is spread over the ranks of a pipeline", "training_step"]),
    (Manual, ["automatic_optimization=False does not work with a pipeline"]),
    (OwnBackward, ["OwnBackward.backward would not be called in a pipeline"]),
    (OwnState, ["OwnState.state_dict does not work in a pipeline", "on_save_checkpoint"]),
    (Loose, ["Loose cannot be cut into stages", "pipeline_layers()"]),
    (Unequal, ["training_step: ranks 0 and 1 are in one pipe", "distributed_sampler_kwargs"]),
]


def attempt(net: Any, **kwargs: Any) -> Exception | None:
    run = run_of(2, **kwargs)
    loaders = () if type(net) is Unequal else (batches("", 1), batches("", 1))
    try:
        run.fit(net, *loaders)
    except Exception as error:
        return error
    return None


def attempts(kinds: list[type[Own]]) -> list[tuple[str, str]]:
    found = []
    for kind in kinds:
        kwargs = {"use_distributed_sampler": False} if kind is Unequal else {}
        error = attempt(kind(), num_sanity_val_steps=0, **kwargs)
        found.append((type(error).__name__, str(error)))
    return found


def test_an_error_in_a_step_ends_all_ranks_with_its_text(ranks: Any) -> None:
    """With step, action, stage and rank."""
    results = ranks(2)(attempts, [kind for kind, _ in IN_STEP])
    for number, (kind, words) in enumerate(IN_STEP):
        for found in results:
            name, text = found[number]
            assert name == StageError.__name__, kind
            assert all(word in text for word in words), text


def test_what_cannot_be_done_is_refused_before_a_step(ranks: Any) -> None:
    results = ranks(2)(attempts, [kind for kind, _ in BEFORE])
    for number, (kind, words) in enumerate(BEFORE):
        for found in results:
            name, text = found[number]
            assert name == ModelError.__name__, (kind, text)
            assert all(word in text for word in words), text


def still_a_module(kind: type[Own]) -> list[float]:
    net = kind()
    attempt(net)
    return [float(net.model(torch.zeros(1, 8).double()).sum().detach())]


def test_a_refused_module_can_be_called_as_before(ranks: Any) -> None:
    expected = float(model()(torch.zeros(1, 8).double()).sum().detach())
    assert ranks(2)(still_a_module, Loose) == [[expected]] * 2


def with_batch(samples: int) -> tuple[str, str]:
    data = TensorDataset(torch.zeros(samples, 8).double(), torch.zeros(samples, 3).double())
    try:
        run_of(0).fit(Own(), DataLoader(data, batch_size=8))
    except ConfigError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_batch_that_does_not_divide_is_told_the_nearest_sizes(ranks: Any) -> None:
    """The second batch is the dataset's rest of 6."""
    for name, text in ranks(2)(with_batch, 14):
        assert name == ConfigError.__name__
        assert "pipeline.micro_batches" in text
        assert "6 samples do not make 4 equal micro-batches" in text
        assert "4 or 8 samples, or 3 or 6 micro-batches" in text
        assert "drop_last=True" in text


def with_callback(make: Callable[[], Any]) -> str:
    try:
        run_of(1, callbacks=[make()]).fit(Own(), batches("", 1))
    except ModelError as error:
        return str(error)
    return ""


def swa() -> Any:
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01)


def test_averages_of_the_whole_model_are_refused(ranks: Any) -> None:
    for text in ranks(2)(with_callback, swa):
        assert "StochasticWeightAveraging averages the whole model" in text


@pytest.mark.parametrize(
    "keys",
    [{"stage": 1, "pipeline": "1f1b"}, {"config": {"pipeline": {"schedule": "1f1b", "stages": 2}}}],
    ids=["argument", "config"],
)
def test_fabric_refuses_a_pipeline_by_name(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.schedule .*Fabric") as caught:
        fabric_strategy_class("lightning.pytorch")(**keys)
    assert "ZeroStrategy" in str(caught.value) and "PipeEngine" in str(caught.value)
