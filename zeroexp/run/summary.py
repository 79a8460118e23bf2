"""The few lines before and after a run: what starts, how it ended. Every number says its unit
and what it counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroexp import __version__
from zeroexp.config import Config
from zeroexp.run import status
from zeroexp.run.directory import RunDirectory
from zeroexp.run.failure import Verdict
from zeroexp.run.forecast import Forecast
from zeroexp.run.record import human_bytes, human_seconds

_KINDS = {"params": "parameters", "grads": "gradients", "optim": "optimizer"}


def state_words(state: Mapping[str, Mapping[str, int]]) -> str:
    """``parameters 1.00 MiB, gradients 1.00 MiB, optimizer 2.00 MiB`` (a tier is named where it
    is not the device, which is left out where all of a kind is elsewhere).
    """
    parts = []
    for kind, word in _KINDS.items():
        tiers = state.get(kind, {})
        for tier, size in tiers.items():
            if size or (tier == "device" and not any(tiers.values())):
                parts.append(
                    f"{word} {human_bytes(size)}" + ("" if tier == "device" else f" on {tier}")
                )
    return ", ".join(parts)


def shown(path: Path) -> str:
    """``path`` as one would type it here: relative where it lies below the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def total_bytes(by_op: Mapping[str, int]) -> int:
    """Bytes of all collectives of one step, control traffic left out."""
    return sum(size for op, size in by_op.items() if op != "control")


def largest_rank(by_rank: Mapping[str, Any]) -> str:
    """The rank with the most state, as a key of ``by_rank``."""
    return max(by_rank, key=lambda rank: sum(sum(kind.values()) for kind in by_rank[rank].values()))


def _pipeline(config: Config, plan: Forecast | None) -> str:
    """``pipeline 1f1b: 4 ranks = pipe 2 x data 2; …; idle 11.1% of a step as planned``."""
    pipeline, count = config.pipeline, config.num_micro_batches
    words = (
        f"pipeline {pipeline.schedule}: {config.ranks} ranks = pipe {pipeline.size} x data "
        f"{config.data_ranks}; each data rank's batch in {count} part{'s' * (count > 1)} of "
        f"{config.micro_batch_size // count}"
    )
    planned = None if plan is None else plan.pipeline
    if planned is not None:
        idle = planned.simulation.bubble_fraction
        words += f"; idle {idle:.1%} of a step as planned"
        if planned.choice is not None:
            words += f" ({planned.schedule.name})"
    return words


def opening_lines(
    config: Config, plan: Forecast | None, directory: RunDirectory, threads: int
) -> list[str]:
    """What is about to run: version, placement, precision, model, directory and the prediction."""
    ranks = config.ranks
    where = "CPU" if config.trainer.accelerator == "cpu" else "GPU"
    plural = "s" if ranks > 1 else ""
    thread_words = f"{threads} thread{'s' if threads > 1 else ''} each"
    model = config.model.target if config.model.kind == "external" else config.model.kind
    size = f" of {plan.size}" if plan is not None else ""
    accumulate = config.trainer.accumulate_grad_batches
    copies = config.data_ranks
    batch = (
        f"batch of {config.batch_size} sequences x {config.data.seq_len} tokens per step = "
        f"{copies} {'data ' * config.pipeline.is_on}rank{'s' if copies > 1 else ''} x "
        f"{accumulate} micro-batch{'es' if accumulate > 1 else ''} x {config.micro_batch_size}"
    )
    lines = [
        f"zeroexp {__version__}: ZeRO stage {config.zero.stage} on {ranks} {where} rank{plural} "
        f"({thread_words}), compute {config.precision.compute}",
        f"model {model}{size}; {batch}",
        f"run directory: {shown(directory.path)}",
    ]
    if config.pipeline.is_on:
        lines.insert(2, _pipeline(config, plan))
    if plan is not None:
        rank = largest_rank(plan.predicted["state_bytes"])
        lines.append(
            f"predicted state of rank {rank}: {state_words(plan.predicted['state_bytes'][rank])}"
        )
        sent = plan.predicted["comm_bytes_per_step"].get(rank) or {}
        lines.append(
            f"predicted traffic of rank {rank}: {human_bytes(total_bytes(sent))} sent per step"
            + _moved_words(plan, rank)
        )
    if config.moe.kind != "none":
        lines.append(_experts_words(config))
    if config.offload.uses_files:
        lines.append(f"swap files below {shown(Path(str(config.offload.nvme.dir)))}")
    return lines


def _experts_words(config: Config) -> str:
    moe = config.moe
    words = (
        f"experts: {moe.experts} in each of {moe.num_blocks(config.model.layers)} blocks, "
        f"{moe.num_choices} for a token ({moe.kind})"
    )
    if moe.expert_parallel > 1:
        words += f", {moe.experts // moe.expert_parallel} of them on each of "
        words += f"{moe.expert_parallel} ranks"
    if moe.kind == "expert_choice":
        words += "; they choose by the whole batch, so the loss of a token knows later ones"
    return words


def _moved_words(plan: Forecast, rank: str) -> str:
    """``, 4.00 MiB down to other tiers and 2.00 MiB up``; empty where nothing moves."""
    words = ""
    moved, files = (
        plan.predicted[f"{name}_bytes_per_step"].get(rank) or {} for name in ("transfer", "io")
    )
    if any(moved.values()):
        down, up = (human_bytes(moved.get(way, 0)) for way in ("down", "up"))
        words += f", {down} down to other tiers and {up} up"
    if any(files.values()):
        words += f", {human_bytes(files['read'])} read and {human_bytes(files['written'])} written"
    return words


def closing_lines(
    directory: RunDirectory, verdict: Verdict, result: Mapping[str, Any], began: float
) -> list[str]:
    """How the run ended: the first failure first, or the figures of a good run."""
    took = human_seconds(time.time() - began)
    if verdict.status == status.OK:
        return [*_figures(result), f"ok after {took} | {shown(directory.result)}"]
    lines: list[str] = []
    first = verdict.first
    if first is not None and verdict.status == status.CONFIG:
        lines.append(f"zeroexp: {first.message}")
    elif first is not None and first.brief:
        lines.append(f"first error, on rank {first.rank}:")
        lines += [f"  {line}" for line in first.brief.rstrip().splitlines()]
    lines.append(f"zeroexp: {verdict.status} after {took}: {verdict.reason}")
    if verdict.failed_rank is not None:
        lines.append(f"log of that rank: {shown(directory.log(verdict.failed_rank))}")
    elif verdict.status == status.CRASH:
        lines.append(f"log of the agent: {shown(directory.agent_log)}")
    return lines


def _figures(result: Mapping[str, Any]) -> list[str]:
    parts = [f"{result['steps']} steps"]
    if result["skipped_steps"]:
        parts.append(f"{result['skipped_steps']} of them skipped")
    if result["loss_last"] is not None:
        parts.append(
            f"loss {result['loss_first']:.4f} -> {result['loss_last']:.4f} (mean over ranks)"
        )
    if result["val_loss"] is not None:
        parts.append(f"validation loss {result['val_loss']:.4f}")
    lines = [" | ".join(parts)]
    times = result["step_time_s"]
    if times["median"] is not None:
        rate = result["tokens_per_s"]
        speed = f"{rate:,.0f} tokens/s over all ranks, " if rate is not None else ""
        lines.append(
            f"{speed}step {times['median']:.4f} s median, {times['p95']:.4f} s p95 "
            f"of {times['n']} steps after warm-up"
        )
    if result.get("moe"):
        layers = result["moe"].values()
        lines.append(
            f"experts at the end: MaxVio {max(layer['max_vio'] for layer in layers):.2f} and "
            f"{max(layer['drop_rate'] for layer in layers):.1%} dropped in the worst layer, "
            f"auxiliary loss {result['auxiliary_loss_last'] or 0.0:.4f}"
        )
    mfu = result["mfu"]
    if mfu["value"] is not None:
        peak = f"{mfu['peak_flops'] / 1e9:,.0f} GFLOP/s"
        lines.append(f"MFU {mfu['value']:.1%} of an assumed peak of {peak} (how: result.json)")
    states = {rank: state for rank, state in result["state_bytes"].items() if state is not None}
    if states:
        rank = largest_rank(states)
        peak = result["peak_rss_bytes"].get(rank)
        sent = result["comm_bytes_per_step"].get(rank)
        traffic = f" | {human_bytes(total_bytes(sent))} sent per step" if sent is not None else ""
        lines.append(f"state of rank {rank}: {state_words(states[rank])}")
        lines.append(f"rank {rank}: {human_bytes(peak)} peak resident memory{traffic}")
        lines += _transfer_lines(result, rank)
    return [*lines, *_disk_lines(result)]


def _transfer_lines(result: Mapping[str, Any], rank: str) -> list[str]:
    """What crossed between the device and other tiers, for a run in which something did."""
    moved = result["transfer_bytes_per_step"].get(rank) or {}
    if not any(moved.values()):
        return []
    planned = (result["predicted"]["transfer_bytes_per_step"] or {}).get(rank)
    return [f"rank {rank}, per step: {_two_ways(moved, planned, _BETWEEN)} to and from other tiers"]


_BETWEEN = {"down": "down", "up": "up"}
_FILES = {"read": "read", "written": "written"}


def _two_ways(
    sizes: Mapping[str, int], planned: Mapping[str, int] | None, words: Mapping[str, str]
) -> str:
    """``1.00 MiB down (predicted 1.00 MiB), 2.00 MiB up (…)``."""
    parts = []
    for key, word in words.items():
        text = f"{human_bytes(sizes.get(key, 0))} {word}"
        if planned is not None:
            text += f" (predicted {human_bytes(planned.get(key, 0))})"
        parts.append(text)
    return ", ".join(parts)


def _disk_lines(result: Mapping[str, Any]) -> list[str]:
    """What the swap files of all ranks cost; the rank that speaks is the one that waited most."""
    by_rank = {rank: io for rank, io in (result["io"] or {}).items() if io is not None}
    if not by_rank:
        return []
    rank = max(by_rank, key=lambda rank: by_rank[rank]["waited_s_per_step"] or 0.0)
    io, lines = by_rank[rank], []
    sizes = result["io_bytes_per_step"].get(rank)
    planned = (result["predicted"]["io_bytes_per_step"] or {}).get(rank)
    if sizes is not None:
        lines.append(f"rank {rank}, per step: {_two_ways(sizes, planned, _FILES)} in swap files")
    rate = io["gb_per_s"]
    if rate is not None:
        text = f"rank {rank}: {rate:.2f} GB/s while swap files moved"
        alone = next((o["alone_gb_per_s"] for o in by_rank.values() if o["alone_gb_per_s"]), None)
        if alone is not None:
            text += (
                f"; alone there: {alone['read']:.2f} GB/s reading, {alone['written']:.2f} writing"
            )
        lines.append(text)
    if io["waited_s_per_step"] is not None:
        share = f" ({io['waited_fraction']:.0%} of it)" if io["waited_fraction"] else ""
        lines.append(
            f"rank {rank}: a step waited {io['waited_s_per_step']:.4f} s for swap files{share}, "
            f"mean of {io['steps']} steps"
        )
    total = result["io_all_ranks"] or {}
    if total.get("written_total") is not None:
        text = (
            f"swap files of all ranks, whole run: {human_bytes(total['read_total'])} read, "
            f"{human_bytes(total['written_total'])} written"
        )
        if total["written_tb_per_day"] is not None:
            text += f"; {total['written_tb_per_day']:.3g} TB written per day at this rate"
        lines.append(text)
    return lines
