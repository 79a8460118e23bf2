"""One process, no process group: the strategy under a Trainer, and everything it refuses by
name."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroexp.errors import ConfigError, ModelError, OptimizerError, ZeroexpError
from zeroexp.strategies import strategy_class
from zeroexp.strategies.faults import EXIT_SIGTERM, Meeting

ZeroStrategy = strategy_class("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).pow(2).mean()
        self.seen.append((torch.is_inference_mode_enabled(), loss.is_inference()))
        return loss

    test_step = validation_step
    predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(rows: int = 6) -> DataLoader[Any]:
    values = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(values, batch_size=2)  # type: ignore[arg-type]


def trainer(strategy: Any, **kwargs: Any) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(strategy=strategy, **{**quiet, **kwargs})


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


# --------------------------------------------------------------------------------- it trains


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_process_trains_as_the_stock_strategy(stage: int) -> None:
    import torch.distributed as dist

    ours, theirs = Net(), Net()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
    trainer(ZeroStrategy(stage), **options).fit(ours, data())
    assert not dist.is_initialized()  # one process needs no group, and leaves none behind
    trainer("auto", **options).fit(theirs, data())
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        assert torch.equal(a, b)


def test_one_process_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run with more ranks would take LOCAL_RANK for a sign that its ranks exist."""
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    trainer(ZeroStrategy(3)).fit(Net(), data())
    assert [name for name in names if name in os.environ] == []


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_never_runs_in_inference_mode(stage: int) -> None:
    """Lightning spares gloo groups and its own FSDP only; a buffer gathered there would break
    training."""
    net = Net()
    run = trainer(ZeroStrategy(stage), max_epochs=2)
    run.fit(net, data(), data())
    run.validate(net, data(), verbose=False)
    run.test(net, data(), verbose=False)
    run.predict(net, data())
    assert len(net.seen) > 12
    assert set(net.seen) == {(False, False)}
    stock = Net()
    trainer("auto").validate(stock, data(), verbose=False)
    assert set(stock.seen) == {(True, True)}  # what would have happened


def test_the_module_is_ordinary_afterwards() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    parameters = list(net.parameters())
    trainer(ZeroStrategy(3)).fit(net, data())
    assert [name for name, _ in net.named_parameters()] == names
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    twin = copy.deepcopy(net)
    again = pickle.loads(pickle.dumps(net.state_dict()))
    for a, b in zip(twin.parameters(), again.values(), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    net(torch.ones(1, 4)).sum().backward()
    assert net.layers[0].weight.grad is not None
    net.double()


def test_an_exception_leaves_the_module_whole() -> None:
    """One process has nobody to wait for."""

    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    net = Fails()
    with pytest.raises(RuntimeError, match="boom"):
        trainer(ZeroStrategy(3)).fit(net, data())
    assert all(p.isfinite().all() for p in net.parameters())
    trainer(ZeroStrategy(2)).fit(Net(), data())


def test_outside_a_run_there_is_no_engine() -> None:
    with pytest.raises(ZeroexpError, match="from setup to the end of a run"):
        _ = ZeroStrategy(1).engine


# --------------------------------------------------------------------------------- pickles


def test_strategy_and_precision_survive_a_pickle() -> None:
    strategy = ZeroStrategy(3, timeout=9, bucket="2MiB")
    trainer(strategy, precision="bf16-mixed")
    twin = pickle.loads(pickle.dumps(strategy))
    assert type(twin) is ZeroStrategy
    assert twin.asked == strategy.asked
    assert type(twin.precision_plugin) is type(strategy.precision_plugin)
    assert twin.precision_plugin.precision == "bf16-mixed"


# --------------------------------------------------------------------------------- refused by name


def test_a_compiled_module_is_refused_with_the_way_to_do_it() -> None:
    compiled = torch.compile(Net(), backend="eager")
    with pytest.raises(ModelError, match=r"block\.forward = torch\.compile\(block\.forward\)"):
        trainer(ZeroStrategy(1)).fit(compiled, data())


def test_pruning_is_refused() -> None:
    from lightning.pytorch.callbacks import ModelPruning

    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(ModelError, match="ModelPruning replaces parameters"):
        trainer(ZeroStrategy(1), callbacks=[pruning]).fit(Net(), data())


def test_a_fit_without_an_optimizer_is_refused() -> None:
    class Bare(Net):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(OptimizerError, match="returned None"):
        trainer(ZeroStrategy(1)).fit(Bare(), data())


def test_lbfgs_is_refused() -> None:
    class Quasi(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises((OptimizerError, ModelError), match="LBFGS"):
        trainer(ZeroStrategy(0)).fit(Quasi(), data())


def test_step_arguments_are_refused() -> None:
    class Extra(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            optimizer.step(closure=closure, scale=2.0)

    with pytest.raises(OptimizerError, match="takes no scale"):
        trainer(ZeroStrategy(1)).fit(Extra(), data())


@pytest.mark.parametrize(
    ("precision", "word"),
    [("16-true", "16-mixed"), ("transformer-engine", "bf16-mixed")],
)
def test_other_precisions_are_refused(
    precision: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        if precision == "16-true":
            trainer(ZeroStrategy(1), precision=precision)
        else:  # the real plugin needs a package that only exists for CUDA
            plugin = pl.plugins.Precision()
            plugin.precision = precision
            ZeroStrategy(1).precision_plugin = plugin
    [problem] = caught.value.problems
    assert precision in problem.problem
    assert word in problem.fix


def test_precision_is_said_in_one_place() -> None:
    config = {"precision": {"compute": "bf16"}}
    with pytest.raises(ConfigError, match="in the strategy's config"):
        trainer(ZeroStrategy(config=config), precision="64-true")
    assert trainer(ZeroStrategy(config=config)).precision == "bf16-mixed"
    assert trainer(ZeroStrategy(config=config), precision="bf16-mixed").precision == "bf16-mixed"


def test_a_scaler_of_ones_own_is_refused() -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    with pytest.raises(ConfigError, match="GradScaler"):
        trainer(ZeroStrategy(1), plugins=[plugin])
    usual = pl.plugins.MixedPrecision("16-mixed", "cpu")
    assert trainer(ZeroStrategy(1), plugins=[usual]).precision == "16-mixed"


def test_unknown_start_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="popen, spawn"):
        ZeroStrategy(1, start_method="thread")


def test_a_sweep_that_would_start_itself_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's script launcher runs sys.argv again: under hydra -m that is the whole sweep."""

    class HydraConfig:
        @staticmethod
        def initialized() -> bool:
            return True

        @staticmethod
        def get() -> Any:
            return types.SimpleNamespace(mode="RunMode.MULTIRUN")

    fake = types.SimpleNamespace(HydraConfig=HydraConfig)
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", fake)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # stock strategies leave it behind
    with pytest.raises(ConfigError, match="start_method='spawn'"):
        trainer(ZeroStrategy(1), devices=2)
    trainer(ZeroStrategy(1), devices=1)
    trainer(ZeroStrategy(1, start_method="spawn"), devices=2)


def test_a_group_of_another_run_is_refused() -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        strategy = ZeroStrategy(1)
        trainer(strategy, devices=2)
        with pytest.raises(ZeroexpError, match="process group of 1 ranks exists"):
            strategy.start_process_group()
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------- SIGTERM alone


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_run_between_batches(handlers: None) -> None:
    user: list[int] = []
    mine = lambda signum, frame: user.append(signum)  # noqa: E731
    signal.signal(signal.SIGTERM, mine)

    class Told(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch_idx)
            if batch_idx == 1:
                signal.raise_signal(signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    net = Told()
    with pytest.raises(SystemExit) as caught:
        trainer(ZeroStrategy(1)).fit(net, data(20))
    assert caught.value.code == EXIT_SIGTERM == 143
    assert user == [signal.SIGTERM]  # a handler that was there before is still called
    assert 2 <= len(net.seen) <= 4
    assert signal.getsignal(signal.SIGTERM) is mine


def test_sigterm_ends_an_evaluation(handlers: None) -> None:
    class Told(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch_idx)
            if batch_idx == 1:
                signal.raise_signal(signal.SIGTERM)
            return super().validation_step(batch, batch_idx)

    with pytest.raises(SystemExit) as caught:
        trainer(ZeroStrategy(1)).validate(Told(), data(20), verbose=False)
    assert caught.value.code == EXIT_SIGTERM


def test_a_meeting_of_one_is_complete() -> None:
    assert Meeting().everyone()


# --------------------------------------------------------------------------------- what is left
# alone


def test_other_callbacks_and_the_usual_warnings_are_untouched() -> None:
    """The learning rate monitor sees the user's scheduler, and torch's order warning does not
    appear."""

    class Rated(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "rate"}]

    net = Rated()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(ZeroStrategy(2))
        run.fit(net, data())
    assert not [w for w in caught if "optimizer.step()" in str(w.message)]
    assert run.lr_scheduler_configs[0].scheduler.get_last_lr() == [1e-2 / 8]


def test_early_stopping_and_accumulation_scheduling_work() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler

    class Logs(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.log("flat", torch.tensor(1.0), sync_dist=True)

    stop = EarlyStopping("flat", patience=1)
    run = trainer(
        ZeroStrategy(3),
        max_epochs=9,
        callbacks=[stop, GradientAccumulationScheduler({0: 1, 1: 3})],
    )
    run.fit(Logs(), data(), data())
    assert run.current_epoch == 2
    assert run.global_step == 3 + 1
