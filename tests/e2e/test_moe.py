"""``python train.py moe=…``: the run, its figures, and the same again after a resume."""

from __future__ import annotations

import json

import pytest
from processes import TINY, Command

pytestmark = pytest.mark.ranks

MOE = ["moe=top2", "moe.experts=4", "moe.capacity_factor=1.0", "moe.jitter=0.1", "moe.z_loss=0.001"]


def test_experts_train_under_stage_3_with_offload_and_resume_to_the_same_loss(
    train: Command,
) -> None:
    words = [*TINY, *MOE, "zero=stage3", "offload=cpu", "trainer.devices=2"]
    words.append("logger.kinds=[tensorboard]")
    done = train(*words, "checkpoint=full", "checkpoint.every=2", "checkpoint.keep=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "experts: 4 in each of 2 blocks, 2 for a token (top2)" in done.stdout
    assert "MaxVio" in done.stdout
    (run,) = train.runs()
    result = json.loads((run / "result.json").read_text())

    # the plan is what happened: gates and experts are parameters like others
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    for rank, sent in result["comm_bytes_per_step"].items():
        del sent["control"]
        assert result["predicted"]["comm_bytes_per_step"][rank] == sent

    # 4 sequences of 16 tokens with 2 experts each; balance 1 where all is even, z log(4)^2
    assert set(result["moe"]) == {"model.blocks.0.mlp", "model.blocks.1.mlp"}
    for layer in result["moe"].values():
        assert sum(layer["tokens_per_expert"]) == 4 * 16 * 2
        assert layer["max_vio"] == max(layer["tokens_per_expert"]) / 32 - 1
        assert 0 <= layer["drop_rate"] < 1
    added = sum(
        0.01 * layer["losses"]["balance"] + 0.001 * layer["losses"]["z"]
        for layer in result["moe"].values()
    )
    assert result["auxiliary_loss_last"] == pytest.approx(added, rel=1e-5)

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[3]["moe"] == result["moe"] and rows[3]["loss"] == result["loss_last"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    layer = "model.blocks.1.mlp"
    for name in ("max_vio", "drop_rate", "balance_loss", "z_loss"):
        assert [event.step for event in curves.Scalars(f"moe/{layer}/{name}")] == [1, 2, 4]
    last = [curves.Scalars(f"moe_tokens/{layer}/{expert}")[-1].value for expert in range(4)]
    assert last == result["moe"][layer]["tokens_per_expert"]

    # the noise of the gates goes on where it was
    half = run / "checkpoints" / "step-00000002.ckpt"
    again = train(*words, f"checkpoint.resume={half}", "name=again")
    assert again.returncode == 0, again.stdout + again.stderr
    (second,) = train.runs("runs/again/*")
    resumed = json.loads((second / "result.json").read_text())
    assert resumed["loss_last"] == result["loss_last"]
    assert resumed["val_loss"] == result["val_loss"]


@pytest.mark.full
def test_experts_on_two_ranks_train_and_resume_on_all(train: Command) -> None:
    words = [*TINY, "moe=top2", "moe.experts=8", "zero=stage3", "trainer.devices=2"]
    spread = [*words, "moe.expert_parallel=2"]
    done = train(*spread, "checkpoint=full", "checkpoint.every=2", "checkpoint.keep=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = train.runs()
    result = json.loads((run / "result.json").read_text())
    assert result["predicted"]["state_bytes"] == result["state_bytes"]
    for rank, sent in result["comm_bytes_per_step"].items():
        predicted = result["predicted"]["comm_bytes_per_step"][rank]
        moved, even = sent.pop("all_to_all"), predicted.pop("all_to_all")
        assert 0 < moved < 2 * even
        del sent["control"]
        assert predicted == sent

    losses = [result["loss_last"]]
    half = run / "checkpoints" / "step-00000002.ckpt"
    for number, again in enumerate((spread, words)):
        name = f"again{number}"
        more = train(*again, f"checkpoint.resume={half}", f"name={name}")
        assert more.returncode == 0, more.stdout + more.stderr
        (second,) = train.runs(f"runs/{name}/*")
        losses.append(json.loads((second / "result.json").read_text())["loss_last"])
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
