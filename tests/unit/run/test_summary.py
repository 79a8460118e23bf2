"""The lines around a run, and the verdict on memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.config import Config
from zeroexp.report.plan_page import plan_page
from zeroexp.run import forecast as forecasting
from zeroexp.run.directory import RunDirectory
from zeroexp.run.failure import RankFailure, Verdict
from zeroexp.run.forecast import forecast
from zeroexp.run.record import human_bytes
from zeroexp.run.summary import closing_lines, opening_lines, shown, state_words

ASKED = Config.from_mapping(
    {
        "zero.stage": 3,
        "trainer": {"devices": 2, "accelerator": "cpu", "accumulate_grad_batches": 2},
        "precision.compute": "fp32",
        "optim.kind": "adamw",
    }
)
CONFIG = ASKED.resolved()


def test_the_forecast_adds_up_the_state_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "total_memory_bytes", lambda: 1 << 30)
    made = forecast(CONFIG)
    assert made is not None
    # 16 bytes per parameter in all, over two ranks of one node, and padding
    padding = sum(made.predicted["padding_bytes"].values())
    assert made.needed_bytes == 16 * made.num_params + padding
    assert made.fits is True


def test_what_exceeds_the_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forecast(CONFIG)
    assert made is not None and made.needed_bytes is not None
    monkeypatch.setattr(forecasting, "total_memory_bytes", lambda: made.needed_bytes - 1)
    small = forecast(CONFIG)
    assert small is not None and small.fits is False
    assert "launch.guard=off" in small.verdict


def test_the_disk_is_asked_for_the_swap_files_of_all_ranks_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ASKED.updated({"offload": "nvme", "offload.nvme.dir": str(tmp_path)}).resolved()
    # fp32 AdamW: a copy and two moments
    needed = 12 * 820_352
    for free, fits in ((needed + (1 << 20), True), (needed - 1, False)):
        monkeypatch.setattr(forecasting, "free_bytes", lambda path, free=free: free)
        made = forecast(config)
        assert made is not None and made.fits is fits
        assert needed <= made.disk_bytes < needed + (1 << 18)  # padding
        page = plan_page(config, made)
        assert f"Swap files take {human_bytes(made.disk_bytes)}" in page
        assert f"{human_bytes(free)} " in page and str(tmp_path) in page
        assert ("Use another offload.nvme.dir" in page) is not fits
        assert made.verdict.startswith("Swap files") is not fits
    # what is on disk takes no memory: parameters and gradients remain
    assert made.needed_bytes is not None and made.needed_bytes < 9 * made.num_params


def test_parameters_that_are_born_on_disk_are_there_twice_for_a_moment(tmp_path: Path) -> None:
    keys = {"offload": "nvme_params", "offload.nvme.dir": str(tmp_path), "zero.reduce": "last"}
    for stage, per_parameter in ((3, 24), (2, None)):
        made = forecast(ASKED.updated({**keys, "zero.stage": stage}).resolved())
        assert made is not None
        on_disk = sum(
            kind["nvme"]
            for state in made.predicted["state_bytes"].values()
            for kind in state.values()
        )
        if per_parameter is None:  # what every rank has whole is built whole
            assert made.disk_bytes == on_disk
        else:  # parameter, gradient, what is stepped and two moments; and the parameter again
            assert made.disk_bytes == pytest.approx(per_parameter * made.num_params, rel=0.01)


def test_a_disk_that_cannot_be_asked_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "free_bytes", lambda path: None)
    made = forecast(ASKED.updated({"offload": "nvme"}).resolved())
    assert made is not None and made.fits is None and "is not known" in made.verdict


def test_the_page_shows_what_crosses_between_tiers_and_what_a_fraction_comes_to() -> None:
    config = ASKED.updated(
        {"offload": "cpu", "offload.fraction": 0.5, "optim.decay_norm_and_bias": True}
    ).resolved()
    made = forecast(config)
    assert made is not None
    page = plan_page(config, made)
    assert "gradients (device)  gradients (cpu)" in page and "(nvme)" not in page
    assert "moves between the device and its other tiers" in page
    assert "swap files" not in page.lower()
    assert f"offload.fraction 0.5: {made.offloaded:.1%} of the optimizer state" in page
    assert 0.25 < made.offloaded <= 0.5
    assert "offload.fraction" not in plan_page(CONFIG, forecast(CONFIG))


def test_opening_names_tiers_and_the_folder_of_the_swap_files(tmp_path: Path) -> None:
    config = ASKED.updated({"offload": "nvme", "offload.nvme.dir": str(tmp_path)}).resolved()
    text = "\n".join(opening_lines(config, forecast(config), RunDirectory(tmp_path), 1))
    assert " down to other tiers and " in text and " read and " in text
    assert f"swap files below {tmp_path}" in text


def test_of_a_gpu_and_of_a_foreign_model_nothing_is_claimed() -> None:
    on_gpu = CONFIG.updated({"trainer.accelerator": "gpu"})
    made = forecast(on_gpu)
    assert made is not None and made.fits is None and "unknown" in made.verdict
    external = Config.from_mapping({"model.kind": "external", "model.target": "a.b:C"})
    assert forecast(external) is None
    assert "a.b:C" in plan_page(external, None)


def test_opening_says_where_how_much_and_what_is_predicted(tmp_path: Path) -> None:
    lines = opening_lines(CONFIG, forecast(CONFIG), RunDirectory(tmp_path), 1)
    text = "\n".join(lines)
    assert "ZeRO stage 3 on 2 CPU ranks (1 thread each), compute fp32" in lines[0]
    assert "24 sequences x 128 tokens per step = 2 ranks x 2 micro-batches x 6" in lines[1]
    assert str(tmp_path) in lines[2]
    assert "predicted state of rank" in text and "sent per step" in text
    assert len(lines) <= 6


def test_plan_page_has_a_line_for_each_rank() -> None:
    made = forecast(CONFIG)
    assert made is not None
    page = plan_page(CONFIG, made).splitlines()
    heads = [i for i, line in enumerate(page) if line.split()[:1] == ["rank"]]
    assert len(heads) == 2
    state_head, traffic_head = (page[i].split() for i in heads)
    assert state_head == [
        "rank",
        "parameters",
        "gradients",
        "optimizer",
        "together",
        "of",
        "it",
        "padding",
    ]
    assert traffic_head == ["rank", "all-gather", "reduce-scatter", "together"]
    assert [page[heads[0] + i].split()[0] for i in (1, 2)] == ["0", "1"]


def test_a_failure_shows_the_first_error_whole(tmp_path: Path) -> None:
    first = RankFailure(1, 0.0, kind="ValueError", message="boom", brief="Traceback\n  here\n")
    verdict = Verdict("crash", "rank 1: ValueError: boom", 1, first)
    lines = closing_lines(RunDirectory(tmp_path), verdict, {}, 0.0)
    assert lines[:3] == ["first error, on rank 1:", "  Traceback", "    here"]
    assert lines[3].endswith("rank 1: ValueError: boom") and "crash" in lines[3]
    assert lines[4] == f"log of that rank: {tmp_path / 'rank1.log'}"


def test_a_configuration_fault_found_by_a_rank_reads_like_any_other(tmp_path: Path) -> None:
    first = RankFailure(0, 0.0, kind="ConfigError", message="1 problem …", brief="Traceback")
    verdict = Verdict("config", "rank 0: ConfigError: 1 problem …", 0, first)
    lines = closing_lines(RunDirectory(tmp_path), verdict, {}, 0.0)
    assert lines[0] == "zeroexp: 1 problem …"
    assert not any("Traceback" in line for line in lines)


def test_words_of_state_name_other_tiers() -> None:
    state = {
        "params": {"device": 1024, "cpu": 0},
        "grads": {"device": 0, "cpu": 2048},
        "optim": {"device": 0, "nvme": 3 << 20},
    }
    assert state_words(state) == (
        "parameters 1.00 KiB, gradients 2.00 KiB on cpu, optimizer 3.00 MiB on nvme"
    )


def test_paths_are_shown_as_one_would_type_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "a") == "runs/a"
    assert shown(Path("/elsewhere/a")) == "/elsewhere/a"
