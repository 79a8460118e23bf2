"""metrics.jsonl, progress lines and result.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

from zeroexp.run import result, status
from zeroexp.run.directory import RunDirectory
from zeroexp.run.record import (
    MetricsWriter,
    RankFigures,
    human_bytes,
    human_seconds,
    logged_values,
    progress_line,
    read_figures,
    read_metrics,
)

# DESIGN: result.json, in this order.
KEYS = [
    "schema_version",
    "config_digest",
    "status",
    "reason",
    "failed_rank",
    "steps",
    "skipped_steps",
    "global_batch",
    "loss_first",
    "loss_last",
    "auxiliary_loss_last",
    "val_loss",
    "grad_norm_last",
    "loss_scale",
    "tokens_per_s",
    "step_time_s",
    "mfu",
    "moe",
    "pipeline",
    "state_bytes",
    "padding_bytes",
    "peak_rss_bytes",
    "rss_baseline_bytes",
    "peak_device_bytes",
    "comm_bytes_per_step",
    "transfer_bytes_per_step",
    "io_bytes_per_step",
    "io",
    "io_all_ranks",
    "predicted",
]


def test_rows_are_whole_and_a_half_written_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.append({"step": 1, "loss": math.nan})
    writer.close()
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": None}]
    writer = MetricsWriter(path)
    writer.append({"step": 2, "loss": 0.5})
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 0.5},
    ]


def test_a_row_is_readable_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.append({"step": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    writer.close()


def test_result_has_exactly_the_published_keys(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.launch.mkdir()
    figures = RankFigures(0, steps=7, loss_first=3.0, grad_norm_before=2.0, grad_norm_after=1.0)
    figures.peak_rss_bytes = 100
    figures.write(directory)
    RankFigures(1, steps=7, peak_rss_bytes=120).write(directory)
    made = result.write(directory, config_digest="d", status=status.Status(status.OK), ranks=2)
    assert list(made) == KEYS
    assert json.loads(directory.result.read_text()) == made
    assert made["grad_norm_last"] == {"before": 2.0, "after": 1.0}
    assert made["peak_rss_bytes"] == {"0": 100, "1": 120}
    assert made["reason"] is None and made["failed_rank"] is None
    assert list(made["predicted"]) == [
        "state_bytes",
        "padding_bytes",
        "comm_bytes_per_step",
        "transfer_bytes_per_step",
        "io_bytes_per_step",
    ]


def test_a_run_that_never_measured_anything_has_null_figures(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    crash = status.Status(status.CRASH, "rank 1 was ended by SIGKILL", 1)
    made = result.write(directory, config_digest="d", status=crash, ranks=2)
    assert list(made) == KEYS
    assert (made["status"], made["failed_rank"], made["steps"]) == ("crash", 1, 0)
    assert made["tokens_per_s"] is None
    assert made["state_bytes"] == {"0": None, "1": None}
    assert made["step_time_s"] == {"median": None, "p95": None, "n": 0}


def test_figures_of_many_ranks_come_back_in_rank_order(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.launch.mkdir()
    for rank in (10, 2, 0):
        RankFigures(rank).write(directory)
    assert list(read_figures(directory)) == [0, 2, 10]


def test_a_logger_gets_flat_names_and_the_prediction_beside_them() -> None:
    row = {
        "step": 3,
        "time_s": 1.0,
        "loss": 2.0,
        "mfu": None,
        "tokens_per_s": 10.0,
        "state_bytes": {"params": {"device": 3, "cpu": 4}, "optim": {"device": 8}},
        "sent_bytes": {"all_gather": 5},
    }
    predicted = {"state_bytes": {"params": {"device": 7}}, "sent_bytes": None}
    assert logged_values(row, predicted) == {
        "train/loss": 2.0,
        "speed/tokens_per_s": 10.0,
        "state_bytes/params": 7,
        "state_bytes/optim": 8,
        "sent_bytes/all_gather": 5,
        "predicted_state_bytes/params": 7,
    }


def test_numbers_for_people() -> None:
    assert human_bytes(None) == "-"
    assert human_bytes(1023) == "1023 B"
    assert human_bytes(3 * 2**29) == "1.50 GiB"
    assert human_bytes(2**41) == "2.00 TiB"
    assert human_seconds(123.4) == "2:03"
    assert human_seconds(3723) == "1:02:03"


def test_progress_line_says_step_loss_speed_and_memory() -> None:
    line = progress_line(7, 100, loss=2.5, tokens_per_s=1234.6, memory_bytes=2**30, seconds_left=61)
    assert line == "step   7/100 | loss 2.5000 | 1,235 tokens/s | memory 1.00 GiB | 1:01 left"
    assert progress_line(7, None, loss=None, tokens_per_s=None, memory_bytes=None).startswith(
        "step 7 | loss - | - tokens/s"
    )
