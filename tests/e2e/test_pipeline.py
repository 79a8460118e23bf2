"""``python train.py pipeline=…``: the run, its figures beside the plan's, and the same again after
a resume."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import TINY, Command

pytestmark = pytest.mark.ranks

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
PIPE = ["pipeline.stages=2", "pipeline.micro_batches=2"]
SAVE = ["checkpoint=full", "checkpoint.every=2", "checkpoint.keep=2"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def as_planned(run: Path) -> dict[str, Any]:
    """The result of ``run``, whose state and traffic are those of its plan."""
    result: dict[str, Any] = read(run / "result.json")
    assert result["status"] == "ok"
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    for rank, sent in result["comm_bytes_per_step"].items():
        del sent["control"]
        assert result["predicted"]["comm_bytes_per_step"][rank] == sent
    return result


def test_a_pipeline_trains_and_resumes_to_the_same_loss(train: Command) -> None:
    words = [*TINY, "pipeline=1f1b", *PIPE, "trainer.devices=2"]
    done = train(*words, *SAVE)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = train.runs()
    opening = (
        "pipeline 1f1b: 2 ranks = pipe 2 x data 1; each data rank's batch in 2 parts of 2; idle "
    )
    assert re.search(re.escape(opening) + r"\d+\.\d% of a step as planned\n", done.stdout)
    assert "on 2 CPU ranks" in done.stdout and "= 1 data rank x 1 micro-batch x 4" in done.stdout

    result = as_planned(run)
    assert result["pipeline"] == {
        "schedule": "1f1b",
        "ranks": 2,
        "stages": 2,
        "micro_batches": 2,
        "layers": [2, 3],
        "reason": None,
    }
    assert result["steps"] == 4 and result["global_batch"] == 4
    # 2 parts of 2 sequences of 16 tokens with 32 fp32 numbers each cross, and their gradients back
    boundary = 2 * 2 * 16 * 32 * 4
    assert [result["comm_bytes_per_step"][rank]["send"] for rank in ("0", "1")] == [boundary] * 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    for row in steps:
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_time_s"])
    assert steps[-1]["loss"] == result["loss_last"]
    assert rows[-1]["val_loss"] == result["val_loss"]

    half = run / "checkpoints" / "step-00000002.ckpt"
    again = train(*words, f"checkpoint.resume={half}", "name=again")
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = read(train.runs("runs/again/*")[0] / "result.json")
    assert resumed["loss_last"] == result["loss_last"]
    assert resumed["val_loss"] == result["val_loss"]


def test_auto_measures_and_says_what_it_took(train: Command) -> None:
    words = [*TINY, "pipeline=auto", *PIPE, "pipeline.cut=time", "trainer.devices=2"]
    done = train(*words, "moe=top1", "moe.experts=2")
    assert done.returncode == 0, done.stdout + done.stderr
    result = read(train.runs()[0] / "result.json")
    took, *others = result["pipeline"]["reason"].splitlines()
    assert took.startswith(result["pipeline"]["schedule"]) and "% idle" in took
    assert f"pipeline auto: {took}\n" in done.stdout
    assert all(line.startswith("  not ") for line in others) and others
    # What was measured counts for nothing.
    for layer in result["moe"].values():
        assert sum(layer["tokens_per_expert"]) == 4 * 16


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_stage_3_with_offload_in_a_pipe_is_as_planned(train: Command, schedule: str) -> None:
    words = [*TINY, f"pipeline={schedule}", *PIPE, "zero=stage3", "offload=cpu"]
    done = train(*words, "trainer.devices=4", "data.batch_size=8", *SAVE)
    assert done.returncode == 0, done.stdout + done.stderr
    result = as_planned(train.runs()[0])
    plain = train(*TINY, "trainer.devices=1", "data.batch_size=8", "name=plain")
    assert plain.returncode == 0, plain.stdout + plain.stderr
    alone = read(train.runs("runs/plain/*")[0] / "result.json")
    for name in ("loss_first", "loss_last", "val_loss"):
        assert result[name] == pytest.approx(alone[name], rel=1e-5)
    for when in ("before", "after"):
        norm = alone["grad_norm_last"][when]
        assert result["grad_norm_last"][when] == pytest.approx(norm, rel=1e-4)


@pytest.mark.full
def test_a_sweep_over_schedules(train: Command) -> None:
    words = [*TINY, "-m", "pipeline=gpipe,1f1b,zb_h1", *PIPE, "trainer.devices=2"]
    done = train(*words, "--sweep-dir", "out", seconds=400)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(train.where / "out" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["pipeline"] for row in rows] == ["gpipe", "1f1b", "zb_h1"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    losses = [float(row["loss_last"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_experts_on_every_stage(train: Command) -> None:
    """The command of docs/pipeline.md; what the gates of both stages do is in the result."""
    (line,) = re.findall(r"^python train.py (.* moe=.*)$", PAGE, re.M)
    words = [*TINY, *line.split(), "data.batch_size=8", "precision=fp32"]
    done = train(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read(train.runs()[0] / "result.json")
    assert result["status"] == "ok"
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    for rank, sent in result["comm_bytes_per_step"].items():
        planned = result["predicted"]["comm_bytes_per_step"][rank]
        for op in ("all_gather", "reduce_scatter", "send"):
            assert sent.get(op) == planned.get(op)
        assert sent["all_to_all"] > 0 < planned["all_to_all"]
    assert set(result["moe"]) == {"model.blocks.0.mlp", "model.blocks.1.mlp"}
    added = 0.0
    for layer in result["moe"].values():
        assert sum(layer["tokens_per_expert"]) == 8 * 16 * 2
        assert layer["all_to_all_bytes"] > 0
        added += 0.01 * layer["losses"]["balance"]
    assert result["auxiliary_loss_last"] == pytest.approx(added, rel=1e-5)
    plain = train(*TINY, "moe=top2", "moe.experts=4", "data.batch_size=8", "trainer.max_steps=1",
                  "trainer.devices=1", "precision=fp32", "name=plain")  # fmt: skip
    alone = read(train.runs("runs/plain/*")[0] / "result.json")
    assert plain.returncode == 0
    assert result["loss_first"] == pytest.approx(alone["loss_first"], rel=1e-5)
