"""Rows, tables, CSV, the Pareto front."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from zeroexp.report import write_report
from zeroexp.report.plot import pareto_front, write_plot
from zeroexp.report.row import Row, differing, row_of, rows_below
from zeroexp.report.table import markdown_table, text_table
from zeroexp.run import result
from zeroexp.run.atomic import write_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.record import RankFigures
from zeroexp.run.status import Status


def state(params: int, grads: int, optim: int) -> dict[str, dict[str, int]]:
    return {"params": {"device": params}, "grads": {"device": grads}, "optim": {"device": optim}}


def make_run(path: Path, status: Status, config: dict[str, object]) -> RunDirectory:
    directory = RunDirectory(path)
    directory.launch.mkdir(parents=True)
    directory.config.write_text(yaml.safe_dump(config))
    write_json(directory.plan, {"state_bytes": {"0": state(1, 1, 2), "1": state(2, 2, 4)}})
    for rank in (0, 1):
        figures = RankFigures(rank, steps=9, loss_last=1.5, tokens_per_s=100.0)
        figures.state_bytes = state(10 + rank, 20, 30)
        figures.peak_rss_bytes, figures.rss_baseline_bytes = 1000 + rank, 400 + 100 * rank
        figures.comm_bytes_per_step = {"all_gather": 5, "reduce_scatter": 6 + rank, "control": 99}
        figures.write(directory)
    result.write(directory, config_digest="d", status=status, ranks=2)
    status.write(directory)
    return directory


def test_a_row_takes_the_rank_that_has_most(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "a", Status("ok"), {}), 3, {"zero": "stage3"})
    assert (row.index, row.status, row.steps, row.differences) == (3, "ok", 9, {"zero": "stage3"})
    assert (row.params_bytes, row.grads_bytes, row.optim_bytes) == (11, 20, 30)
    assert row.state_bytes == 61 and row.predicted_state_bytes == 8
    assert row.peak_bytes == 1001
    assert row.peak_above_baseline_bytes == 600  # rank 0's: 1000 - 400, rank 1's is 501
    assert row.comm_bytes_per_step == 12  # control traffic is not the model's


def test_a_directory_without_a_result_is_a_row_of_unknowns(tmp_path: Path) -> None:
    row = row_of(RunDirectory(tmp_path), 0, {})
    assert (row.status, row.peak_bytes, row.state_bytes) == ("none", None, None)


def test_differing_words() -> None:
    lines = [["a=1", "b=2"], ["a=1", "b=3", "c=x=y"], ["a=1", "b=2"]]
    assert differing(lines) == [{"b": "2"}, {"b": "3", "c": "x=y"}, {"b": "2"}]
    assert differing([["a=1"]]) == [{}]


def test_runs_of_several_sweeps_differ_by_their_configurations(tmp_path: Path) -> None:
    one = {"zero": {"stage": 0}, "paths": {"runs": "x"}, "name": "p"}
    two = {"zero": {"stage": 3}, "paths": {"runs": "y"}, "name": "q"}
    make_run(tmp_path / "sweep" / "000", Status("ok"), one)
    make_run(tmp_path / "sweep" / "001", Status("crash", "rank 1 was ended by SIGKILL", 1), two)
    rows = rows_below([tmp_path, tmp_path / "sweep"])
    assert [(row.differences, row.status) for row in rows] == [
        ({"zero.stage": "0"}, "ok"),
        ({"zero.stage": "3"}, "crash"),
    ]


def test_tables_say_why_a_run_failed(tmp_path: Path) -> None:
    rows = [
        row_of(make_run(tmp_path / "a", Status("ok"), {}), 0, {"k": "x|y"}),
        Row(1, {"k": "z", "l": "w"}, "config", "two\nlines"),
    ]
    text = text_table(rows)
    head, rule, first, second, *rest = text.splitlines()
    assert head.split()[:4] == ["run", "k", "l", "status"]
    assert first.split()[:3] == ["0", "x|y", "ok"] and second.split()[:4] == [
        "1",
        "z",
        "w",
        "config",
    ]
    assert len(rule) == len(head) and len(first) == len(head)
    assert rest[-1] == "run 1: config: two lines"
    markdown = markdown_table(rows).splitlines()
    assert markdown[0].startswith("| run | k | l | status |")
    assert "x\\|y" in markdown[2]
    assert len({line.replace("\\|", "").count("|") for line in markdown[:4]}) == 1
    assert markdown[-1] == "* run 1: config: two lines"


def test_tiers_and_files_have_columns_where_there_are_some(tmp_path: Path) -> None:
    plain = row_of(make_run(tmp_path / "plain", Status("ok"), {}), 0, {})
    assert plain.state_on_nvme_bytes == 0 and plain.written_tb_per_day is None
    directory = make_run(tmp_path / "disk", Status("ok"), {})
    for rank in (0, 1):
        figures = RankFigures(rank, steps=9)
        figures.state_bytes = {"params": {"device": 1, "nvme": 5}, "optim": {"cpu": 7 + rank}}
        figures.io_bytes_per_step = {"read": 2048, "written": 1024 * (1 + rank)}
        figures.io = {
            "read_total": 1,
            "written_total": 1,
            "waited_s_per_step": 0.25 * rank,
            "written_tb_per_day": 1.5,
        }
        figures.write(directory)
    result.write(directory, config_digest="d", status=Status("ok"), ranks=2)
    row = row_of(directory, 1, {})
    tiers = (row.state_on_device_bytes, row.state_on_cpu_bytes, row.state_on_nvme_bytes)
    assert tiers == (1, 8, 5) and row.state_bytes == 14  # rank 1's, who has more
    assert (row.io_read_bytes_per_step, row.io_written_bytes_per_step) == (2048, 2048)
    assert (row.io_waited_s_per_step, row.written_tb_per_day) == (0.25, 3.0)
    for table in (text_table, markdown_table):
        for heading in ("on cpu", "on nvme", "read/step", "waited (s)", "TB/day"):
            assert heading in table([plain, row]) and heading not in table([plain])
        assert "10^12 bytes" in table([row]) and "10^12 bytes" not in table([plain])


def test_csv_has_plain_numbers_and_empty_unknowns(tmp_path: Path) -> None:
    rows = [
        row_of(make_run(tmp_path / "a", Status("ok"), {}), 0, {"k": "1"}),
        Row(1, {}, "crash", 'says "no", twice'),
    ]
    text = write_report(tmp_path, rows)
    assert "results.csv" in text
    with open(tmp_path / "results.csv") as file:
        first, second = csv.DictReader(file)
    assert first["run"] == "0" and first["k"] == "1" and first["state_bytes"] == "61"
    assert float(first["tokens_per_s"]) == 100.0
    assert second["reason"] == 'says "no", twice' and second["state_bytes"] == ""
    assert (tmp_path / "results.md").read_text().startswith("# Results")


def test_pareto_front_is_what_nobody_beats() -> None:
    points = [(4.0, 9.0), (1.0, 2.0), (2.0, 5.0), (3.0, 5.0), (2.0, 4.0), (5.0, 9.0)]
    expected = [
        i
        for i, (m, t) in enumerate(points)
        if not any((n <= m and u >= t) and (n, u) != (m, t) for n, u in points)
    ]
    assert sorted(pareto_front(points)) == sorted(expected) == [0, 1, 2]


def test_a_picture_needs_two_runs(tmp_path: Path) -> None:
    rows = [Row(i, {}, "ok", tokens_per_s=10.0 * i, peak_bytes=i << 20) for i in (1, 2)]
    assert write_plot(tmp_path / "p.png", rows[:1]) is None
    assert not (tmp_path / "p.png").exists()
    pytest.importorskip("matplotlib")
    assert write_plot(tmp_path / "p.png", rows) == tmp_path / "p.png"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
