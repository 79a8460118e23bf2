"""One process, no process group: the strategy under a Trainer."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from single_lab import Net, ZeroStrategy, data, trainer, weights
from torch import Tensor, nn

from zeroexp.errors import ZeroexpError
from zeroexp.strategies.faults import EXIT_SIGTERM, Meeting

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


# --------------------------------------------------------------------------------- devices, nodes


def test_at_stage_3_parameters_are_the_engines_to_move() -> None:
    """All of them may not fit the device at once; buffers and metrics have nobody else to move
    them."""
    import torchmetrics

    from zeroexp.strategies.devices import move

    def parts() -> nn.Module:
        made = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "metric": torchmetrics.MeanMetric()})
        return nn.ModuleDict({"inner": made})

    there = torch.device("meta")
    whole, rest = parts(), parts()
    move(whole, there, parameters=True)
    move(rest, there, parameters=False)
    for module, parameters in ((whole, "meta"), (rest, "cpu")):
        inner = module["inner"]  # type: ignore[index]
        assert inner["norm"].weight.device.type == parameters
        assert inner["norm"].running_mean.device.type == "meta"
        assert inner["metric"].mean_value.device.type == "meta"


def test_ranks_are_counted_over_nodes() -> None:
    from lightning.fabric.plugins.environments import LightningEnvironment

    environment = LightningEnvironment()
    environment.set_world_size(6)
    environment.node_rank = lambda: 1  # type: ignore[method-assign]
    environment.local_rank = lambda: 2  # type: ignore[method-assign]
    cpu = [torch.device("cpu")] * 3
    strategy = ZeroStrategy(1, cluster_environment=environment, parallel_devices=cpu)
    strategy.num_nodes = 2
    strategy.set_world_ranks()
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 5}
    assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (6, 5, False)
    assert strategy.config_here(strategy.asked).data_ranks == 6
    strategy.cluster_environment = LightningEnvironment()
    strategy.set_world_ranks()  # leaves Lightning's idea of the rank as it was
