"""The callback that measures a run of train.py: one row a step, figures for result.json, the
progress line.

What is measured and how it is written is in :mod:`zeroexp.run.measure` and
:mod:`zeroexp.run.record`; this file only reads the trainer at the right moments. It needs
:class:`ZeroStrategy`, whose engine and ledger it reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from zeroexp.config import Config
from zeroexp.run.atomic import read_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.disk import rate_of
from zeroexp.run.disk_use import DiskUse, gb_per_s
from zeroexp.run.experts import ExpertUse
from zeroexp.run.measure import PeakFlops, StepClock, mfu
from zeroexp.run.procfs import peak_rss_bytes
from zeroexp.run.record import (
    PROGRESS_LEGEND,
    MetricsWriter,
    RankFigures,
    ThrottledFigures,
    logged_values,
    progress_line,
)


class Measurement(Callback):
    """Measures every optimizer step; all ranks carry one.

    Args:
        config: the resolved configuration of the run.
        directory: where rows (rank 0) and figures (every rank) go.
        rank: this rank.
        rss_baseline_bytes: resident memory of this rank before model and data were made.
        flops_per_token: model FLOPs of forward and backward per token; None: unknown.
        flops_rule: the words that say how they are counted.
        peak: FLOP/s of the hardware of all ranks.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        rank: int,
        *,
        rss_baseline_bytes: int | None,
        flops_per_token: int | None,
        flops_rule: str,
        peak: PeakFlops,
    ) -> None:
        self.clock = StepClock(config.measure.warmup_steps)
        self.figures = RankFigures(rank, global_batch=config.batch_size)
        self.figures.rss_baseline_bytes = rss_baseline_bytes
        self._config = config
        self._directory = directory
        self._flops = (flops_per_token, flops_rule, peak)
        self._file = ThrottledFigures(directory, self.figures)
        self._rows: MetricsWriter | None = None
        self._started = 0.0
        self._step = 0  # trainer.global_step of the last step that was measured
        self._losses: list[Tensor] = []  # of the micro-batches of the step under way
        self._auxiliary: list[Tensor] = []  # what the gates of experts add to them
        self._tokens = 0  # of those, over all ranks
        self._mean_loss: Tensor | None = None  # of the last step, on this rank
        self._mean_auxiliary: Tensor | None = None
        self._experts: ExpertUse | None = None
        self._printed_at = 0
        self._control_bytes = 0
        self._disk_use = DiskUse(config.measure.warmup_steps)
        self._disk_alone: dict[str, float] | None = None
        self._highest_rss = 0
        plan = read_json(directory.plan) or {}
        # The planner's figures for this rank, to be drawn beside what happens.
        self._predicted = {
            "state_bytes": plan.get("state_bytes", {}).get(str(rank)),
            "sent_bytes": plan.get("comm_bytes_per_step", {}).get(str(rank)),
            "transfer_bytes": plan.get("transfer_bytes_per_step", {}).get(str(rank)),
            "io_bytes": plan.get("io_bytes_per_step", {}).get(str(rank)),
        }

    # ------------------------------------------------------------------ hooks
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._experts = ExpertUse(pl_module)
        self._printed_at = self._step
        self._started = time.perf_counter()
        pipeline = self.figures.pipeline = self._engine(trainer).arrangement
        if trainer.is_global_zero:
            self._rows = MetricsWriter(self._directory.metrics)
            if pipeline is not None and pipeline["reason"]:
                print(f"pipeline auto: {pipeline['reason'].splitlines()[0]}")
            print(PROGRESS_LEGEND, flush=True)
        self._control_bytes = self._engine(trainer).ledger.comm_bytes().get("control", 0)
        self.clock.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(outputs, Mapping) and isinstance(outputs.get("task_loss"), Tensor):
            # What gates add is not part of what is compared between models.
            self._losses.append(outputs["task_loss"].detach())
            self._auxiliary.append(outputs["auxiliary_loss"].detach())
        elif isinstance(loss, Tensor):
            # Lightning has divided it by the number of micro-batches; a last, shorter step has
            # fewer.
            self._losses.append(loss.detach() * self._config.trainer.accumulate_grad_batches)
        self._tokens += _tokens_in(batch) * self._config.data_ranks
        if trainer.global_step == self._step:
            return  # an accumulating micro-batch
        self._step = trainer.global_step
        self._end_step(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.pause()
        if self._experts is not None:
            self._experts.evaluation_starts()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get("val_loss")
        if value is not None:
            self.figures.val_loss = float(value)
            if self._rows is not None:
                self._rows.append({"step": self._step, "val_loss": self.figures.val_loss})
                print(
                    f"validation after step {self._step}: loss {self.figures.val_loss:.4f} "
                    f"(mean over all ranks)",
                    flush=True,
                )
        if self._experts is not None:
            self._experts.evaluation_ends()
        self.clock.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._mean_loss is not None:
            self.figures.loss_last = self._over_ranks(trainer, self._mean_loss)
        if self._engine(trainer).disk is not None:
            self._take_peaks(trainer)  # first: the probe has a buffer of its own
            self._probe_disk(trainer)
        self._finish(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Rank-local: the other ranks may be gone. On a full disk the first error is to be told.
        with contextlib.suppress(OSError):
            self._finish(trainer)

    # ------------------------------------------------------------------ one step
    def _end_step(self, trainer: Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # the clock would stop when the work is queued, not done
        seconds = self.clock.end_step(self._tokens)
        first = self.figures.first_step_at is None
        if first:
            self.figures.first_step_at = time.time()
        self._mean_loss, self._mean_auxiliary = _mean(self._losses), _mean(self._auxiliary)
        self._losses.clear()
        self._auxiliary.clear()
        self._tokens = 0
        last = self._step == trainer.max_steps
        self._take_traffic(trainer, seconds)
        every = self._config.measure.log_every
        show_every = self._config.trainer.log_every
        shown = first or last or self._step % show_every == 0
        if first or shown or self._step % every == 0:
            loss = None if self._mean_loss is None else self._over_ranks(trainer, self._mean_loss)
            if first:
                self.figures.loss_first = loss
            self.figures.loss_last = loss
            self._take_experts(trainer)
            self._take_engine_figures(trainer)
            row = self._row(trainer, seconds, loss)
            if self._rows is not None and self._step % every == 0:
                self._rows.append(row)
            if shown:
                self._show(trainer, row)
            self._file.update()

    def _over_ranks(self, trainer: Trainer, value: Tensor) -> float:
        """Mean of ``value`` over the data ranks (a collective of one number)."""
        return float(trainer.strategy.reduce(value.clone(), reduce_op="mean"))

    def _row(self, trainer: Trainer, seconds: float, loss: float | None) -> dict[str, Any]:
        figures = self.figures
        rate = self.clock.recent_tokens_per_s(1)
        return {
            "step": self._step,
            "time_s": time.perf_counter() - self._started,
            "loss": loss,
            "auxiliary_loss": figures.auxiliary_loss_last,
            "lr": _learning_rate(trainer),
            "grad_norm": figures.grad_norm_before,
            "grad_norm_clipped": figures.grad_norm_after,
            "loss_scale": figures.loss_scale,
            "skipped_steps": figures.skipped_steps,
            "step_time_s": seconds,
            "tokens_per_s": rate,
            "mfu": mfu(*self._flops[:2], rate, self._flops[2])["value"],
            "peak_rss_bytes": self._peak_rss(),
            "peak_device_bytes": _peak_device_bytes(trainer),
            "state_bytes": self._engine(trainer).ledger.state_bytes(),
            "sent_bytes": figures.comm_bytes_per_step,
            "transfer_bytes": figures.transfer_bytes_per_step,
            **self._io_of_step(trainer),
            "moe": figures.moe,
        }

    def _io_of_step(self, trainer: Trainer) -> dict[str, Any]:
        disk = self._engine(trainer).disk
        if disk is None:
            return {"io_bytes": None, "io_waited_s": None, "io_gb_per_s": None}
        moved = disk.traffic.last_step
        return {
            "io_bytes": self.figures.io_bytes_per_step,
            "io_waited_s": moved.waited,
            "io_gb_per_s": gb_per_s(moved.read + moved.written, moved.busy),
        }

    def _show(self, trainer: Trainer, row: dict[str, Any]) -> None:
        """The progress line, and the row to the loggers (rank 0)."""
        if self._rows is None:
            return
        steps = self._step - self._printed_at
        self._printed_at = self._step
        max_steps = trainer.max_steps if trainer.max_steps > 0 else None
        rate = self.clock.recent_tokens_per_s(steps)
        left = None
        if max_steps is not None and max_steps > self._step and self.clock.steps > steps:
            recent = self.clock.recent_seconds(steps)
            left = recent / steps * (max_steps - self._step) if recent is not None else None
        print(
            progress_line(
                self._step,
                max_steps,
                loss=row["loss"],
                tokens_per_s=rate,
                memory_bytes=row["peak_device_bytes"] or row["peak_rss_bytes"],
                seconds_left=left,
            ),
            flush=True,
        )
        values = logged_values(row, self._predicted)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._step)

    # ------------------------------------------------------------------ figures
    @staticmethod
    def _engine(trainer: Trainer) -> Any:
        return trainer.strategy.engine  # type: ignore[attr-defined]  # ZeroStrategy's

    def _take_experts(self, trainer: Trainer) -> None:
        """Since the row before; on every rank at the same step."""
        figures = self.figures
        if self._experts is not None:
            world = self._engine(trainer).world
            figures.moe = self._experts.figures(world.control, world.pipe)
        if self._mean_auxiliary is not None:
            figures.auxiliary_loss_last = self._over_ranks(trainer, self._mean_auxiliary)

    def _take_engine_figures(self, trainer: Trainer) -> None:
        engine, figures = self._engine(trainer), self.figures
        figures.steps = self._step
        figures.skipped_steps = engine.skipped_steps
        figures.grad_norm_before = _number(engine.grad_norm)
        figures.grad_norm_after = _number(engine.grad_norm_clipped)
        figures.loss_scale = _number(engine.loss_scale)

    def _take_traffic(self, trainer: Trainer, seconds: float) -> None:
        """What the step sent and moved; with a validation or a checkpoint before it, it would count
        that as well."""
        engine, figures = self._engine(trainer), self.figures
        ledger, disk = engine.ledger, engine.disk
        control = ledger.comm_bytes().get("control", 0)
        sent, self._control_bytes = control - self._control_bytes, control
        if not self.clock.undisturbed and figures.comm_bytes_per_step is not None:
            return
        figures.comm_bytes_per_step = {**ledger.comm_bytes_per_step(), "control": sent}
        figures.transfer_bytes_per_step = ledger.transfer_bytes_per_step()
        figures.io_bytes_per_step = {"read": 0, "written": 0}
        if disk is not None:
            moved = disk.traffic.last_step
            figures.io_bytes_per_step = {"read": moved.read, "written": moved.written}
            self._disk_use.add(self.clock.steps, moved, seconds)

    def _probe_disk(self, trainer: Trainer) -> None:
        """What the file engine reaches with nothing beside it, for the first rank of each node."""
        trainer.strategy.barrier("before the probe of the disk")
        if trainer.local_rank == 0:
            alone = rate_of(self._config.offload.nvme)
            if alone is not None:
                self._disk_alone = {"read": alone.read / 1e9, "written": alone.write / 1e9}
        trainer.strategy.barrier("after the probe of the disk")

    def _peak_rss(self) -> int | None:
        """The highest the system ever said: its own counters lag behind and may take some back."""
        now = peak_rss_bytes()
        if now is not None:
            self._highest_rss = max(self._highest_rss, now)
        return self._highest_rss or None

    def _take_peaks(self, trainer: Trainer) -> None:
        if self.figures.peak_rss_bytes is None:
            self.figures.peak_rss_bytes = self._peak_rss()
            self.figures.peak_device_bytes = _peak_device_bytes(trainer)

    def _finish(self, trainer: Trainer) -> None:
        figures = self.figures
        if self._step:  # before the first one there may be no engine
            engine = self._engine(trainer)
            self._take_engine_figures(trainer)
            figures.state_bytes = engine.ledger.state_bytes()
            figures.padding_bytes = engine.ledger.padding_bytes()
            if engine.disk is not None:
                total = engine.disk.traffic.total
                figures.io = self._disk_use.figures(total, self._disk_alone)
        times = self.clock.times()
        figures.tokens_per_s = times.tokens_per_s
        figures.step_time_s = {"median": times.median, "p95": times.p95, "n": times.n}
        flops, rule, peak = self._flops
        figures.mfu = mfu(flops, rule, times.tokens_per_s, peak)
        self._take_peaks(trainer)
        self._file.flush()
        if self._rows is not None:
            self._rows.close()
            self._rows = None


def _mean(values: list[Tensor]) -> Tensor | None:
    return torch.stack(values).float().mean() if values else None


def _tokens_in(batch: Any) -> int:
    """Tokens of one micro-batch on this rank; 0 where the batch does not say."""
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0


def _learning_rate(trainer: Trainer) -> float | None:
    for optimizer in trainer.optimizers:
        return float(optimizer.param_groups[0]["lr"])
    return None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _peak_device_bytes(trainer: Trainer) -> int | None:
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
