"""What swap files cost, from given transfers; and the lines that say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.config.sections.offload import NvmeConfig
from zeroexp.run import status
from zeroexp.run.disk import rate_of
from zeroexp.run.disk_use import DiskUse, over_ranks
from zeroexp.run.record import logged_values
from zeroexp.run.result import assemble
from zeroexp.run.summary import _disk_lines, _transfer_lines
from zeroexp.tiers import Moved

GB = 10**9


def use(warmup: int) -> DiskUse:
    found = DiskUse(warmup)
    found.add(1, Moved(read=9 * GB, written=9 * GB, waited=9.0, busy=9.0), 90.0)
    found.add(2, Moved(read=2 * GB, written=1 * GB, waited=1.0, busy=2.0), 4.0)
    found.add(4, Moved(read=2 * GB, written=1 * GB, waited=2.0, busy=4.0), 6.0)
    return found


TOTAL = Moved(read=20 * GB, written=30 * GB)


def test_figures_of_the_steps_after_the_warm_up() -> None:
    io = use(1).figures(TOTAL, {"read": 3.0, "written": 2.0})
    assert io == {
        "read_total": 20 * GB,
        "written_total": 30 * GB,
        "steps": 2,
        "gb_per_s": pytest.approx(6 / 6),
        "alone_gb_per_s": {"read": 3.0, "written": 2.0},
        "waited_s_per_step": pytest.approx(1.5),
        "waited_fraction": pytest.approx(3 / 10),
        # 2 GB in 10 s of training, 86,400 s a day
        "written_tb_per_day": pytest.approx(0.2 * 86.4),
    }


def test_the_warm_up_counts_where_there_is_nothing_else() -> None:
    assert use(5).figures(TOTAL)["steps"] == 3


def test_a_run_that_ended_before_its_first_step_knows_its_totals_only() -> None:
    io = DiskUse(1).figures(TOTAL)
    assert (io["read_total"], io["written_total"], io["steps"]) == (20 * GB, 30 * GB, 0)
    rest = set(io) - {"read_total", "written_total", "steps"}
    assert all(io[key] is None for key in rest)


def test_sums_over_ranks_are_whole_or_unknown() -> None:
    io = use(1).figures(TOTAL)
    sums = over_ranks({"0": io, "1": io})
    assert sums == {
        "read_total": 40 * GB,
        "written_total": 60 * GB,
        "written_tb_per_day": pytest.approx(2 * 0.2 * 86.4),
    }
    assert over_ranks({"0": None, "1": None}) is None
    half = over_ranks({"0": io, "1": None})
    assert half is not None and set(half.values()) == {None}


def result(io: object, moved: dict[str, int] | None = None) -> dict[str, object]:
    figures = {
        "io": io,
        "io_bytes_per_step": {"read": 3 << 20, "written": 1 << 20},
        "transfer_bytes_per_step": moved,
    }
    planned = {
        "io_bytes_per_step": {"0": {"read": 2 << 20, "written": 1 << 20}},
        "transfer_bytes_per_step": {"0": {"down": 1 << 20, "up": 0}},
    }
    final = status.Status(status.OK)
    return assemble(
        config_digest="d", status=final, figures={0: figures}, predicted=planned, ranks=1
    )


def test_the_lines_say_what_each_number_counts() -> None:
    made = result(use(1).figures(TOTAL, {"read": 3.0, "written": 2.0}))
    assert _disk_lines(made) == [
        "rank 0, per step: 3.00 MiB read (predicted 2.00 MiB), 1.00 MiB written "
        "(predicted 1.00 MiB) in swap files",
        "rank 0: 1.00 GB/s while swap files moved; alone there: 3.00 GB/s reading, 2.00 writing",
        "rank 0: a step waited 1.5000 s for swap files (30% of it), mean of 2 steps",
        "swap files of all ranks, whole run: 18.63 GiB read, 27.94 GiB written; "
        "17.3 TB written per day at this rate",
    ]


def test_a_run_without_files_or_other_tiers_has_no_such_lines() -> None:
    made = result(None, {})
    assert _disk_lines(made) == [] and _transfer_lines(made, "0") == []
    assert made["io_all_ranks"] is None


def test_transfers_are_told_beside_the_plan() -> None:
    made = result(None, {"down": 1 << 20, "up": 2 << 20})
    assert _transfer_lines(made, "0") == [
        "rank 0, per step: 1.00 MiB down (predicted 1.00 MiB), 2.00 MiB up (predicted 0 B) "
        "to and from other tiers"
    ]


def test_curves_of_what_moves_and_none_of_what_does_not() -> None:
    row = {
        "transfer_bytes": {"down": 4},
        "io_bytes": {"read": 8, "written": 0},
        "io_gb_per_s": 1.5,
        "io_waited_s": 0.0,
    }
    assert logged_values(row, {"io_bytes": {"read": 6, "written": 0}}) == {
        "transfer_bytes/down": 4,
        "io_bytes/read": 8,
        "predicted_io_bytes/read": 6,
        "speed/io_gb_per_s": 1.5,
        "speed/io_waited_s": 0.0,
    }
    still = {"transfer_bytes": {}, "io_bytes": None, "io_gb_per_s": None, "io_waited_s": None}
    assert logged_values(still, {"io_bytes": {"read": 0, "written": 0}}) == {}


def test_the_rate_alone_is_measured_in_a_file_that_is_gone(tmp_path: Path) -> None:
    found = rate_of(NvmeConfig(dir=str(tmp_path), block_size=1 << 20, queue_depth=2))
    assert found is not None and found.read > 0 and found.write > 0
    assert (found.block_size, found.queue_depth) == (1 << 20, 2)
    assert list(tmp_path.iterdir()) == []


def test_where_the_rate_cannot_be_measured_it_is_unknown(tmp_path: Path) -> None:
    assert rate_of(NvmeConfig(dir=str(tmp_path / "missing"))) is None
