"""ZeroStrategy trains what DDP trains: losses, clipping, accumulation, samplers, seeds, manual
optimization."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from strategy_lab import (
    WIDTH,
    Net,
    digest,
    distance,
    loader,
    trainer,
    values,
    zero,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

STAGES = (0, 1, 2, 3)


def fit(strategy: Any, net: Any = None, batches: int = 4, **kwargs: Any) -> Any:
    net = net if net is not None else Net()
    run = trainer(strategy, **kwargs)
    run.fit(net, loader(batches))
    return net


# --------------------------------------------------------------------------------- equal to DDP


def all_stages_against_ddp() -> tuple[str, list[str]]:
    return digest(fit("ddp")), [digest(fit(zero(stage=stage))) for stage in STAGES]


def test_every_stage_equals_ddp_bit_for_bit(ranks: Any) -> None:
    for ddp, stages in ranks(2)(all_stages_against_ddp):
        assert stages == [ddp] * 4


def with_options(options: dict[str, Any]) -> list[float]:
    expected = values(fit("ddp", batches=5, **options))
    return [
        distance(values(fit(zero(stage=stage), batches=5, **options)), expected) for stage in STAGES
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},  # the fifth batch is a step of its own
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ],
    ids=["accumulate", "norm", "value", "both"],
)
def test_accumulation_and_clipping_equal_ddp(ranks: Any, options: dict[str, Any]) -> None:
    for distances in ranks(2)(with_options, options):
        assert max(distances) <= 1e-6


class Slope(pl.LightningModule):
    """y = w x, mean squared error, SGD with lr 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, y = batch.unbind(-1)
        return (self.w * x - y).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.engine.grad_norm)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sixteen() -> Tensor:
    x = torch.linspace(-1, 2, 16)
    return torch.stack([x, 3 * x + x.pow(2)], dim=-1)


def slope(stage: int) -> list[tuple[float, list[float]]]:
    results = []
    for micro, accumulate in ((8, 1), (4, 2), (1, 8)):
        net = Slope()
        mine = sixteen()[dist.get_rank() :: 2]
        run = trainer(
            zero(stage=stage),
            max_epochs=5,
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
        )
        run.fit(net, DataLoader(mine, batch_size=micro))  # type: ignore[arg-type]
        results.append((float(net.w.detach()), net.norms))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_the_split_into_micro_batches_does_not_matter(ranks: Any, stage: int) -> None:
    """The global batch of 16 as 2 x 8, 2 x 2 x 4 and 2 x 8 x 1: five steps of full-batch
    descent."""
    x, y = sixteen().double().unbind(-1)
    w, norms = 0.0, []
    for _ in range(5):
        gradient = float((2 * (w * x - y) * x).mean())
        norms.append(abs(gradient))
        w -= 0.1 * gradient
    for results in ranks(2)(slope, stage):
        for got, seen in results:
            assert got == pytest.approx(w, abs=1e-6)
            assert seen == pytest.approx(norms, abs=1e-6)


def reductions(stage: int, accumulate: int) -> tuple[int, int]:
    """Bytes sent in gradient reductions in two steps, and optimizer steps."""
    strategy = zero(stage=stage)
    run = trainer(strategy, accumulate_grad_batches=accumulate)
    seen = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.update(strategy.engine.ledger.comm_bytes())

    run.callbacks.append(Look())
    run.fit(Net(), loader(2 * accumulate))
    return int(seen["reduce_scatter"]), run.global_step


def test_accumulating_batches_are_not_reduced_where_gradients_are_whole(ranks: Any) -> None:
    """zero.reduce=auto: stage 1 reduces once a step, stage 2 (sharded gradients) every
    micro-batch."""
    for one, three in zip(ranks(2)(reductions, 1, 1), ranks(2)(reductions, 1, 3), strict=True):
        assert one[1] == three[1] == 2
        assert three[0] == one[0] > 0
    for one, three in zip(ranks(2)(reductions, 2, 1), ranks(2)(reductions, 2, 3), strict=True):
        assert three[0] == 3 * one[0]


# --------------------------------------------------------------------------------- clipping, norms


class ThreeFour(pl.LightningModule):
    """One parameter whose gradient is (3, 4) on every rank."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * torch.tensor([3.0, 4.0])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        strategy = self.trainer.strategy
        self.seen["norm"] = strategy.engine.grad_norm
        with strategy.full_gradients():
            self.seen["logged"] = float(grad_norm(self, 2)["grad_2.0_norm_total"])
            self.seen["gradient"] = self.weight.grad.tolist()
        self.seen["afterwards"] = self.weight.grad


class OwnClipping(ThreeFour):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=2.5, gradient_clip_algorithm="norm")


class LostClipping(ThreeFour):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ManualClipping(ThreeFour):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()


KINDS: dict[str, Any] = {
    "plain": ThreeFour,
    "own": OwnClipping,
    "lost": LostClipping,
    "manual": ManualClipping,
}


def three_four(kind: str, stage: int, options: dict[str, Any]) -> Any:
    net = KINDS[kind]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(zero(stage=stage), **options)
        run.fit(net, DataLoader(torch.zeros(2, 1), batch_size=1))  # type: ignore[arg-type]
    said = [str(w.message) for w in caught if "configure_gradient_clipping" in str(w.message)]
    return net.weight.tolist(), net.seen, said


NORM = {"gradient_clip_val": 1.0}
VALUE = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("kind", "options", "weight"),
    [
        ("plain", {}, [-3.0, -4.0]),
        ("plain", NORM, [-0.6, -0.8]),
        ("plain", VALUE, [-0.5, -0.5]),
        ("own", {}, [-1.5, -2.0]),
        ("manual", {}, [-0.6, -0.8]),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_is_over_all_ranks(
    ranks: Any, kind: str, options: dict[str, Any], weight: list[float], stage: int
) -> None:
    for got, seen, _ in ranks(2)(three_four, kind, stage, options):
        assert got == pytest.approx(weight, abs=1e-5)
        assert seen["norm"] == pytest.approx(5.0, rel=1e-6)  # on both ranks, before clipping


def test_gradients_can_be_read_before_the_step(ranks: Any) -> None:
    for _, seen, _ in ranks(2)(three_four, "plain", 3, {}):
        assert seen["gradient"] == [3.0, 4.0]
        assert seen["logged"] == pytest.approx(5.0, abs=1e-3)  # Lightning rounds to 4 digits
        assert seen["afterwards"] is None


def test_clipping_that_cannot_reach_the_gradients_is_said(ranks: Any) -> None:
    for got, _, said in ranks(2)(three_four, "lost", 2, {}):
        assert got == [-3.0, -4.0]
        assert len(said) == 1
        assert "self.clip_gradients" in said[0]
    for _, _, said in ranks(2)(three_four, "own", 2, {}):
        assert said == []


# --------------------------------------------------------------------------------- data, seeds,
# start


class Watcher(Net):
    """Remembers which rows it saw, random draws and the order of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []
        self.draws: list[float] = []
        self.order: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.order.append("training_step")
        self.rows += batch[:, 0].tolist()
        self.draws.append(float(torch.rand(())))
        loss = super().training_step(batch, batch_idx)
        self.log("mean_rank", torch.tensor(float(self.trainer.global_rank)), sync_dist=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.order.append("zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.order.append("backward")

    def on_after_backward(self) -> None:
        self.order.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.order.append("step")


def watched(strategy: Any) -> tuple[list[float], list[float], list[str], float]:
    pl.seed_everything(7, verbose=False)
    net = Watcher()
    run = trainer(zero(stage=3) if strategy == "zero" else strategy, accumulate_grad_batches=2)
    run.fit(net, loader(4))
    return net.rows, net.draws, net.order, float(run.callback_metrics["mean_rank"])


def test_ranks_read_different_data_and_log_their_mean(ranks: Any) -> None:
    """Lightning knows a foreign strategy is distributed only by its property ``is_distributed``."""
    (first, *_), (second, *_) = results = ranks(2)(watched, "zero")
    assert len(first) == len(second) == 8
    assert not set(first) & set(second)
    assert [r[3] for r in results] == [0.5, 0.5]


def test_data_random_draws_and_hook_order_are_those_of_ddp(ranks: Any) -> None:
    ours, ddp = ranks(2)(watched, "zero"), ranks(2)(watched, "ddp")
    for mine, theirs in zip(ours, ddp, strict=True):
        assert mine[:3] == theirs[:3]
    # Lightning clears gradients after the forward pass; the engine must not lose anything by it.
    assert ours[0][2][:4] == ["training_step", "zero_grad", "backward", "after_backward"]
    assert ours[0][2][4:8] == ["training_step", "backward", "after_backward", "step"]


def unseeded(stage: int) -> tuple[str, str]:
    net = Net(seed=dist.get_rank())  # every rank builds another model
    fit(zero(stage=stage), net)
    return digest(net), digest(fit("ddp", Net(seed=0)))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_unseeded_model_starts_as_rank_0_built_it(ranks: Any, stage: int) -> None:
    for ours, ddp in ranks(2)(unseeded, stage):
        assert ours == ddp


def returns_none() -> None:
    class Silent(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            return None

    fit(zero(stage=2), Silent())


def test_a_training_step_without_a_loss_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match=r"training_step returned None\. Return the loss"):
        ranks(2)(returns_none)


# --------------------------------------------------------------------------------- other stages of
# a run


def evaluated(stage: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    strategy = zero(stage=stage)

    class Look(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.state.fn == "validate":
                seen["state"] = strategy.engine.ledger.state_bytes()

    net = Net()
    with torch.no_grad():
        whole = net(torch.cat([batch for batch in loader(3)]))
    expected = float(whole.pow(2).mean())
    run = trainer(strategy, callbacks=[Look()])
    seen["val"] = run.validate(net, loader(3), verbose=False)[0]["val"] - expected
    seen["test"] = run.test(net, loader(3), verbose=False)[0]["test"] - expected
    parts = run.predict(net, loader(3))
    seen["predict"] = torch.cat(parts).shape
    seen["after"] = digest(net) == digest(Net())
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_alone_builds_no_optimizer_state(ranks: Any, stage: int) -> None:
    """PL-07: validate, test and predict without fit; the metrics are those of plain evaluation."""
    for seen in ranks(2)(evaluated, stage):
        assert seen["val"] == pytest.approx(0.0, abs=1e-6)
        assert seen["test"] == pytest.approx(0.0, abs=1e-6)
        assert tuple(seen["predict"]) == (6, 3)
        assert sum(seen["state"].get("grads", {}).values()) == 0
        assert sum(seen["state"].get("optim", {}).values()) == 0
        assert sum(seen["state"]["params"].values()) > 0
        assert seen["after"]


def fit_test_fit(stage: int) -> tuple[float, bool]:
    """fit, test, then fit on: the module is whole and usable between the runs."""
    ours, theirs = Net(), Net()
    for strategy, net in ((zero(stage=stage), ours), ("ddp", theirs)):
        run = trainer(strategy)
        run.fit(net, loader(2), loader(1))
        run.test(net, loader(2), verbose=False)
        assert net(torch.ones(1, WIDTH)).isfinite().all()
        run.fit_loop.max_epochs = 2
        run.fit(net, loader(2), loader(1))
    return distance(values(ours), values(theirs)), any(p.is_meta for p in ours.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_fit_test_fit(ranks: Any, stage: int) -> None:
    for away, meta in ranks(2)(fit_test_fit, stage):
        assert away == 0.0
        assert not meta


def summary() -> tuple[int, int, str]:
    counts = {}

    class Look(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            from lightning.pytorch.utilities.model_summary import ModelSummary

            module.example_input_array = torch.zeros(2, WIDTH)
            table = ModelSummary(module, max_depth=1)
            counts["total"], counts["trainable"] = (
                table.total_parameters,
                table.trainable_parameters,
            )
            counts["out"] = str(table.out_sizes[-1])

    fit(zero(stage=3), callbacks=[Look()])
    return counts["total"], counts["trainable"], counts["out"]


def test_summaries_show_the_whole_model(ranks: Any) -> None:
    """Parameters of sharded units are placeholders of the right shape while the summary is made."""
    total = 3 * (WIDTH * WIDTH + WIDTH) + WIDTH * 3 + 3 + 3
    assert ranks(2)(summary) == [(total, total, "[2, 3]")] * 2


# --------------------------------------------------------------------------------- uneven data


class Rows:
    """A loader of one rank's own: ``counts[rank]`` batches."""

    def __init__(self, counts: list[int]) -> None:
        self.count = counts[dist.get_rank()]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(torch.ones(self.count, 2, WIDTH))


def uneven(stage: int, validate: bool) -> tuple[int, int, list[str]]:
    net = Watcher()
    run = trainer(
        zero(stage=stage, timeout=20),
        max_epochs=2,
        use_distributed_sampler=False,
        **({"val_check_interval": 2} if validate else {}),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(net, Rows([5, 4]), Rows([1, 1]) if validate else None)
    said = [str(w.message) for w in caught if "training batches" in str(w.message)]
    return run.global_step, net.order.count("step"), said


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_stops_with_the_one_that_has_fewest_batches(
    ranks: Any, stage: int, validate: bool
) -> None:
    """PL-11: 5 batches on one rank and 4 on the other, also with a validation after every two."""
    (steps, count, said), (other, _, nothing) = ranks(2)(uneven, stage, validate)
    assert steps == other == count == 8  # 4 in each of two epochs
    assert "5 training batches in an epoch and another one 4" in said[0]
    assert nothing == []


def uneven_evaluation(stage: int, what: str) -> int:
    run = trainer(zero(stage=stage, timeout=20), use_distributed_sampler=False)
    if what == "fit":
        run.fit(Net(), Rows([2, 2]), Rows([3, 2]))
    else:
        getattr(run, what)(Net(), Rows([3, 2]))
    return dist.get_rank()


@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
def test_uneven_evaluation_is_an_error_where_it_would_hang(ranks: Any, what: str) -> None:
    """PL-11: told on every rank before the first batch that one of them lacks."""
    said = r"different numbers of batches to evaluate: \[2\.0\] at least, \[3\.0\] at most"
    with pytest.raises(Exception, match=said):
        ranks(2)(uneven_evaluation, 3, what)


def stops_early(stage: int) -> int:
    from lightning.pytorch.callbacks import EarlyStopping

    class Local(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            own = 1.0 - self.trainer.current_epoch if self.global_rank == 0 else 1.0
            self.log("own", own, sync_dist=False)

    run = trainer(zero(stage=stage), max_epochs=6, callbacks=[EarlyStopping("own", patience=1)])
    run.fit(Local(), loader(1), loader(1))
    return int(run.current_epoch)


def test_early_stopping_on_a_ranks_own_metric_stops_every_rank(ranks: Any) -> None:
    """PL-11: rank 1 sees no progress, rank 0 does; they stop in the same epoch."""
    assert ranks(2)(stops_early, 3) == [2, 2]
