"""The pipelines' benchmark: equal work, the order of turns, ratios and bubbles made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import peer_env, pipe, pipe_result, table
from benchmarks.models import next_token_loss
from benchmarks.peers import pipe_single
from benchmarks.pipe_result import DEEPSPEED, OURS, PASSES, SINGLE, STEP, TORCH
from benchmarks.pipe_work import PipeWork
from benchmarks.timings import Timings
from benchmarks.work import WORKS

SMALL = PipeWork(
    vocab=16, context=8, dim=8, layers=2, heads=1, micro_batches=4, samples=1, length=4
)


def test_the_model_is_gpt10() -> None:
    with torch.device("meta"):
        model = PipeWork().model()
    assert sum(p.numel() for p in model.parameters()) == WORKS["gpt10"].num_params


def test_the_stages_in_turn_are_the_model() -> None:
    model = SMALL.model()
    layers = model.pipeline_layers()
    first, last = (SMALL.part(layers, stage) for stage in range(2))
    inputs, targets = SMALL.batch(0)
    assert len(inputs) == len(targets) == 4 and len({*map(str, inputs)}) == 4
    assert (len(first), len(last)) == (2, 2)
    held = [*first.parameters(), *last.parameters()]
    assert {*map(id, held)} == {*map(id, model.parameters())}
    loss = next_token_loss(last(first(inputs[0])), targets[0])
    torch.testing.assert_close(loss, model(inputs[0], targets[0]))


def test_one_process_takes_the_gradient_of_the_mean_loss() -> None:
    """Micro-batches of equal size: that of the whole batch at once."""
    whole = SMALL.model()
    batch = SMALL.batch(3)
    loss = whole(torch.cat(batch.inputs), torch.cat(batch.targets))
    loss.backward()
    single = pipe_single.start(PipeWork(**{**vars(SMALL), "stages": 1}), {})
    assert single.passes(batch) == pytest.approx(float(loss.detach()), rel=1e-6)
    found = [p.grad for p in single.stage.parameters()]
    wanted = [p.grad for _, layer in whole.pipeline_layers() for p in layer.parameters()]
    torch.testing.assert_close(found, wanted)


def stamped(begin: float, *stamps: tuple[str, int, float, float]) -> dict[str, Any]:
    return {"begin": begin, "end": 99.0, "stamps": [list(stamp) for stamp in stamps]}


def test_a_bubble_is_what_no_action_fills() -> None:
    """2 of the 6 s are the first rank's, 3 the second's: 7 of 12 are idle. The last action's end
    counts, not that of the call."""
    first = stamped(10.0, ("FORWARD", 0, 10.5, 11.0), ("BACKWARD", 0, 14.5, 16.0))
    last = stamped(10.25, ("FORWARD", 1, 11.5, 12.5), ("BACKWARD", 1, 12.5, 14.5))
    length, share, (forward, backward) = pipe._measured((first, last))
    assert (length, share) == (6.0, pytest.approx(7 / 12))
    assert (forward, backward) == ([0.5, 1.0], [1.5, 2.0])


def test_the_loss_counts_to_the_last_stage() -> None:
    """Four layers of 1, 2, 4 and 8 s on each rank, backward twice that; the loss takes 16 s."""
    layers = [[2.0**i, 2.0 ** (i + 1)] for i in range(5)]
    found = pipe._by_layers([{"layers": layers}, {"layers": layers}], SMALL)
    assert found == ([3.0, 28.0], [6.0, 56.0])


def case(name: str, losses: dict[str, list[float]], samples: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "what": "w", "unit": "ms", "samples": samples, "losses": losses}


def test_targets_and_rows() -> None:
    """90 ms are 0.9 of 100; 130 are 1.3 of 100; a ratio counts while the losses agree."""
    same = {SINGLE: [8.0, 7.0], OURS: [8.0, 7.0], TORCH: [8.0002, 7.0], DEEPSPEED: [8.0, 7.0]}
    passes = case(PASSES, same, {SINGLE: [150.0], TORCH: [100.0], OURS: [90.0]})
    step = case(STEP, same, {DEEPSPEED: [100.0], OURS: [130.0]})

    def verdicts(*cases: dict[str, Any]) -> list[tuple[str, str | None]]:
        found = pipe_result.targets(Timings({"cases": list(cases)}))
        return [(v.status, v.measured) for v in found]

    assert verdicts(passes, step) == [
        ("met", "0.900 (0.900..0.900)"),
        ("not met", "1.300 (1.300..1.300)"),
    ]
    torn = case(PASSES, same | {TORCH: [8.0, 7.7]}, passes["samples"])
    lost = case(STEP, same, {DEEPSPEED: "rank 1: no", OURS: [130.0]})
    assert verdicts(torn, lost) == [
        ("not met", f"losses of {TORCH} differ by 1.0e-01"),
        ("missing", None),
    ]
    assert verdicts(case(PASSES, {OURS: [8.0]}, passes["samples"])) == [("missing", None)] * 2
    assert [v.status for v in pipe_result.targets(None)] == ["missing"] * 2
    rows = pipe_result.rows(Timings({"cases": [passes, lost]}))
    assert rows[4] == (
        f"| {PASSES} | {OURS} | 90.0 (90.0..90.0) ms | 0.900 (0.900..0.900) of {TORCH} | 0e+00 |"
    )
    assert rows[5] == f"| {STEP} | {DEEPSPEED} | missing: rank 1: no | | |"
    assert {row.count("|") for row in rows} == {6}


def test_the_page_has_the_pipeline() -> None:
    machine = {"cpu": "Some CPU", "cpu_family_model": "1/2", "cores": 2, "isa": ["avx2"]}
    head = {"command": "c", "commit": "0", "dirty": False, "date": "d", "load_before": 0.1}
    file = {"kind": "pipe", **head, "machine": machine | {"memory_bytes": 2**30, "kernel": "6"}}
    page = table.page([file | {"cases": [case(PASSES, {}, {OURS: [3.0]})]}])
    assert "## Pipeline" in page
    assert f"| {PASSES} | {OURS} | 3.0 (3.0..3.0) ms |" in page


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(peer_env, "PYTHON", tmp_path / "none" / "python")


@pytest.mark.full
def test_all_take_turns_and_a_peer_that_is_not_there_is_missing(
    no_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "TINY", SMALL)
    said: list[str] = []
    *_, result = pipe.measure(2, 1, said.append, work=PipeWork(**{**vars(SMALL), "layers": 6}))
    timings = Timings(result)
    missing = {
        (case["name"], name): found
        for case in result["cases"]
        for name, found in case["samples"].items()
        if isinstance(found, str)
    }
    assert missing == {(STEP, DEEPSPEED): "no environment for it: python -m benchmarks peers"}
    for case in result["cases"]:
        for name, found in case["samples"].items():
            assert isinstance(found, str) or len(found) == 2, name
            differs = pipe_result.loss_difference(timings, case["name"], name)
            assert differs is None or differs < 1e-5
    assert {name for case in result["cases"] for name in case["samples"]} > set(
        pipe_result.VARIANTS
    )
    first = [line.split(": ")[1] for line in said if line.startswith(f"round 2, {PASSES}")]
    assert first[0].startswith(TORCH)  # the turn moves on
