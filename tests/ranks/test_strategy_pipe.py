"""A LightningModule in a pipe under the Trainer is what one process makes of the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from strategy_lab import digest, distance, load, shared_folder, trainer, values, zero
from strategy_pipe_lab import KINDS, Story, batches, blocks, numbers, run_of, story
from torch import Tensor, nn

CLOSE = 1e-10


def told(kind: str, folder: Path) -> tuple[Story, float]:
    """One process's story of a run that ends after the third of four epochs, and the loss that ends
    it."""
    whole = story(kind, None, folder, threshold=0.0)
    losses = whole.watch.validations[1:]  # the first is Lightning's sanity check
    assert whole.epochs == 4 and losses == sorted(losses, reverse=True)
    threshold = (losses[1] + losses[2]) / 2
    return story(kind, None, folder, threshold), threshold


def same(found: dict[str, float], expected: dict[str, float], limit: float = CLOSE) -> bool:
    return found == {name: pytest.approx(value, abs=limit) for name, value in expected.items()}


def check(found: list[Story], expected: Story, *, v_shaped: bool = False) -> None:
    """``v_shaped``: the last stage is where the first one is."""
    assert expected.epochs == 3 and expected.steps == 6
    for each in found:
        assert (each.epochs, each.steps) == (3, 6)
        assert distance(each.state, expected.state) <= CLOSE
        assert each.rates == expected.rates == [pytest.approx(0.02 * 0.7**3)]
        assert same(each.metrics, expected.metrics) and same(each.logged, expected.logged)
        assert each.metrics == found[0].metrics and each.logged == found[0].logged
        for mine, theirs in zip(each.watch.batches, expected.watch.batches, strict=True):
            assert same(mine, theirs)
        # Of each data rank's own samples; all together they are the batch's.
        assert {frozenset(o) for o in each.watch.outputs} == {frozenset(("loss", "third"))}
        assert each.watch.validations == pytest.approx(expected.watch.validations, abs=CLOSE)
        assert each.best[0] == expected.best[0]
        assert each.best[1] == pytest.approx(expected.best[1], abs=CLOSE)
        assert [same(*pair) for pair in zip(each.tested, expected.tested, strict=True)] == [True]
    half = len(found) // 2
    for name in ("loss", "third"):
        for number, theirs in enumerate(expected.watch.outputs):
            mine = [each.watch.outputs[number][name] for each in found]
            assert mine[:half] == mine[half:]
            assert sum(mine[:half]) / half == pytest.approx(theirs[name], abs=CLOSE)
    # What predict_step returns is on the ranks of the last stage, None on the others.
    with_last, others = (found[:half], found[half:]) if v_shaped else (found[half:], found[:half])
    assert [each.predicted for each in others] == [[None]] * half
    dealt: Tensor = torch.stack([each.predicted[0] for each in with_last], dim=1).flatten(0, 1)
    assert float((dealt - expected.predicted[0]).abs().max()) <= CLOSE


def pipe_story(kind: str, stage: int, threshold: float, keys: dict[str, Any] | None = None) -> Any:
    return story(kind, stage, shared_folder("pipe"), threshold, keys)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "stage"),
    [(2, "sequential", 2), (4, "layers", 3), (2, "configured", 0)],
)
def test_a_run_with_everything_in_it_equals_one_process(
    ranks: Any, tmp_path: Path, num_ranks: int, kind: str, stage: int
) -> None:
    """Accumulation (the last step of an epoch has one batch), clipping, a schedule by steps,
    validation, early stopping and the best checkpoint by a logged value, logging of every kind,
    test and predict."""
    expected, threshold = told(kind, tmp_path)
    check(ranks(num_ranks)(pipe_story, kind, stage, threshold), expected)


def stories(kind: str, threshold: float, cases: list[tuple[int, dict[str, Any]]]) -> Any:
    return [pipe_story(kind, stage, threshold, keys) for stage, keys in cases]


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "virtual": 2},
    {"schedule": "zb_h1"},
    {"schedule": "zb_v"},
]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_schedule_and_stage_under_the_trainer(
    ranks: Any, tmp_path: Path, kind: str, stage: int
) -> None:
    expected, threshold = told(kind, tmp_path)
    cases = [(stage, keys) for keys in SCHEDULES]
    found = ranks(4)(stories, kind, threshold, cases, timeout=240)
    for number in range(len(cases)):
        v_shaped = SCHEDULES[number]["schedule"] == "zb_v"
        check([each[number] for each in found], expected, v_shaped=v_shaped)


# --------------------------------------------------------------------------------- resuming


def leg(stage: int | None, net: Any, epochs: int, folder: Path, again: bool) -> Any:
    """Train ``net`` to the end of ``epochs`` in a pipe (``stage`` None: without one), from
    the checkpoint in ``folder``, and leave one there."""
    file = folder / "saved.ckpt"
    readers = dist.get_world_size() if stage is None and dist.is_initialized() else None
    run = run_of(stage, max_epochs=epochs, accumulate_grad_batches=2)
    run.fit(net, batches("sequential", 4, readers=readers), ckpt_path=str(file) if again else None)
    run.save_checkpoint(file)
    return values(net), load(file)["optimizer_states"][0]["state"], run.global_step


def legs(stages: list[tuple[int | None, int | None]]) -> list[Any]:
    found = []
    for first, second in stages:
        folder = shared_folder("resumed")
        leg(first, KINDS["sequential"](), 1, folder, again=False)
        found.append(leg(second, KINDS["sequential"](), 2, folder, again=True))
    return found


LEGS: list[tuple[int | None, int | None]] = [(2, 3), (1, None), (None, 0)]


def test_checkpoints_go_into_a_pipe_and_out_of_it(ranks: Any, tmp_path: Path) -> None:
    """Pipe -> pipe of another stage, pipe -> no pipe, no pipe -> pipe: parameters, moments, steps
    and schedule are those of one process that is not interrupted."""
    state, moments, steps = leg(None, KINDS["sequential"](), 2, tmp_path, again=False)
    assert steps == 4
    for found in ranks(2)(legs, LEGS):
        for mine, optimizer, done in found:
            assert distance(mine, state) <= CLOSE and done == steps
            assert optimizer.keys() == moments.keys()
            assert max(distance(optimizer[n], moments[n]) for n in moments) <= CLOSE


# --------------------------------------------------------------------------------- runs after runs


def twice() -> Any:
    net = KINDS["sequential"]()
    states = []
    for _ in range(2):
        run = run_of(2, max_epochs=1)
        before = run.validate(net, batches("sequential", 1, seed=2), verbose=False)
        run.fit(net, batches("sequential", 2))
        states.append((digest(net), before, float(net.model(torch.ones(1, 8).double()).sum())))
        assert not any(p.is_meta or 0 in p.stride() for p in net.parameters())
    run.fit_loop.max_epochs = 2
    run.fit(net, batches("sequential", 2))  # the same Trainer goes on
    return states, run.global_step, values(net)


def test_the_module_is_whole_after_every_run(ranks: Any) -> None:
    """Two Trainers and one Trainer twice: the weights are whole, equal and one process's."""
    net = KINDS["sequential"]()
    sums = []
    for epochs in (1, 1):
        run = run_of(None, max_epochs=epochs)
        run.fit(net, batches("sequential", 2))
        sums.append(float(net.model(torch.ones(1, 8).double()).sum()))
    run.fit_loop.max_epochs = 2
    run.fit(net, batches("sequential", 2))
    results = ranks(2)(twice)
    for states, steps, state in results:
        assert [each for _, _, each in states] == pytest.approx(sums, abs=CLOSE)
        assert steps == run.global_step == 4
        assert states == results[0][0]
        assert distance(state, values(net)) <= CLOSE


class Several(KINDS["configured"]):  # type: ignore[misc]
    """Validates on two loaders; keeps what it logs at the end of the epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("epochs", 1.0, reduce_fx="sum", sync_dist=True)


def several(stage: int | None) -> dict[str, float]:
    run = run_of(stage, num_sanity_val_steps=0)
    loaders = [batches("", 1, seed=2), batches("", 2, seed=3)]
    run.fit(Several(), batches("", 1), loaders)
    return numbers(run.callback_metrics)


def test_several_loaders_are_validated_under_their_numbers(ranks: Any) -> None:
    expected = several(None)
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= expected.keys()
    for found in ranks(2)(several, 1):
        found["epochs"] /= 2  # Lightning adds up over all ranks
        assert same(found, expected, 1e-6)


class Overflowing(KINDS["configured"]):  # type: ignore[misc]
    """One micro-batch of the second batch has gradients that fp16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.model(x.float()) - y.float()).pow(2).mean()
        big = batch_idx == 1 and float(y[0, 0]) == self.first
        return loss * 1e30 if big else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first = float(batch[1][0, 0])  # of the first micro-batch


def overflowing(stage: int) -> Any:
    net = Overflowing(nn.Sequential(*blocks()))
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            seen.append((strategy.engine.loss_scale, strategy.engine.skipped_steps, rate))

    pipe = {"schedule": "1f1b", "stages": 2, "micro_batches": 4}
    config = {"zero": {"stage": stage}, "pipeline": pipe, "precision": {"compute": "fp16"}}
    run = trainer(zero(config=config), callbacks=[Look()])
    run.fit(net, batches("", 3))
    return seen, digest(net)


@pytest.mark.parametrize("stage", [1, 3])
def test_all_stages_skip_a_step_whose_gradients_overflow(ranks: Any, stage: int) -> None:
    """One micro-batch's infinity is everybody's skipped step; the schedule waits, too."""
    results = ranks(2)(overflowing, stage)
    seen, _ = results[0]
    assert [skipped for _, skipped, _ in seen] == [0, 1, 1]
    assert [rate for _, _, rate in seen] == pytest.approx([0.02, 0.02, 0.014])
    assert results[1] == results[0]
