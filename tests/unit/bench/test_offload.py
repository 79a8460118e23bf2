"""Ratios and targets of offload results made by hand, and the disk's rate at a small size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disk, offload, offload_result, table
from benchmarks.contender import Unavailable
from benchmarks.modes import MODES, OFFLOADED
from benchmarks.offload_result import OffloadResult, seconds_for
from benchmarks.training import Settings

MIB = 1 << 20
GB = 10**9


def mode(
    seconds: list[float], moved: tuple[float, float] | None = (0, 0), **changes: Any
) -> dict[str, Any]:
    """A mode of two ranks, one step a round; each rank moves ``moved`` bytes in it."""
    memory = {"tensors": 9000, "rss_baseline": 100_000}
    return {
        "status": "ok",
        "reason": None,
        "launches": [
            {
                "first_step_seconds": 4.0,
                "peak_rss": [110_000, 109_000],
                "peak_rss_steady": [109_500, 108_000],
            }
        ],
        "rounds": [[[s / 2], [s]] for s in seconds],
        "disk": [[moved and list(moved)] * 2 for _ in seconds],
        "losses": [2.0],
        "memory": [memory, memory],
        "versions": {"torch": "2.13.0"},
        "notes": [],
    } | changes


def result(rates: list[dict[str, float]], **modes: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "Some CPU", "cpu_family_model": "1/2", "cores": 2, "isa": ["avx2"]}
    return {
        "kind": "offload",
        "command": "python -m benchmarks offload gpt125",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02",
        "machine": machine | {"memory_bytes": 2**30, "kernel": "6.1"},
        "load_before": 0.1,
        "settings": {"world_size": 2, "threads": 1, "rounds": 2, "steps": 1},
        "work": {
            "name": "gpt125",
            "title": "a toy",
            "num_params": 1000,
            "modes": {name.replace("_", "-"): found for name, found in modes.items()},
        },
        "disk": {"num_bytes": MIB, "rounds": rates, "reason": None if rates else "no compiler"},
    }


# 1 GB/s for reads, 2 for writes, 4 for both at once; in the second round half of that.
RATES = [
    {"read": 1.0 * GB, "write": 2.0 * GB, "mixed": 4.0 * GB},
    {"read": 0.5 * GB, "write": 1.0 * GB, "mixed": 2.0 * GB},
]


def test_what_is_both_read_and_written_goes_at_the_mixed_rate() -> None:
    # 2 GB each way at 4 GB/s, and 1 GB more of reads at 1 GB/s or of writes at 2 GB/s.
    assert seconds_for(3 * GB, 2 * GB, RATES[0]) == pytest.approx(1 + 1)
    assert seconds_for(2 * GB, 3 * GB, RATES[0]) == pytest.approx(1 + 0.5)
    assert seconds_for(0, 0, RATES[0]) == 0


def test_the_limit_is_the_larger_of_memory_and_disk_in_each_round() -> None:
    # Two ranks move 1 GB each way each: 4 GB, which is 1 s in the first round, 2 s in the second.
    nvme = mode([1.8, 2.4], (GB, GB))
    found = OffloadResult(result(RATES, zx3=mode([1.5, 1.6]), zx3_nvme=nvme))
    assert found.bytes_per_step("zx3-nvme") == (2 * GB, 2 * GB)
    needed = found.disk_seconds("zx3-nvme")
    assert needed is not None and (needed.low, needed.high) == (1.0, 2.0)
    ratio = found.to_limit("zx3-nvme")
    assert ratio is not None  # 1.8 / max(1.5, 1) and 2.4 / max(1.6, 2)
    assert [ratio.low, ratio.median, ratio.high] == pytest.approx([1.2, 1.2, 1.2])


def status(file: dict[str, Any] | None) -> list[str]:
    return [v.status for v in offload_result.targets(file and OffloadResult(file))]


def test_targets_take_the_faster_of_two_peers() -> None:
    modes = {
        "zx3": mode([1.0, 1.0]),
        "zx3_cpu": mode([1.02, 1.02]),
        "zx3_nvme": mode([1.1, 2.2], (GB, GB)),
        "ds3_cpu": mode([1.5, 1.5]),
        "ds3_nvme": mode([4.0, 8.0]),
        "ds3_nvme_pipelined": mode([1.9, 3.8]),
    }
    file = result(RATES, **modes)
    # to its limit 1.1; to the pipelined peer 0.579, to the other 0.275; 1.02 of memory, 0.68 of
    # the peer's; 10 000 bytes of peak for 1000 parameters
    assert status(file) == ["met", "not met", "met", "met", "met"]
    found = offload_result.targets(OffloadResult(file))
    assert found[1].measured == "0.579 (0.579..0.579) of ds3-nvme-pipelined"
    del modes["ds3_nvme_pipelined"]
    assert status(result(RATES, **modes))[1] == "met"
    modes["ds3_cpu"]["losses"] = [2.1]
    assert status(result(RATES, **modes))[3] == "not met"


@pytest.mark.parametrize("missing", ["peer", "memory", "rates", "count"])
def test_without_one_of_the_numbers_a_target_is_missing(missing: str) -> None:
    gone = mode([], status="missing", reason="rank 0: no libaio")
    nvme = mode([1.1, 2.2], None if missing == "count" else (GB, GB))
    modes = {"zx3": mode([1.0, 1.0]), "zx3_nvme": nvme, "ds3_nvme": mode([4.0, 8.0])}
    if missing == "peer":
        modes["ds3_nvme"] = gone
    if missing == "memory":
        modes["zx3"] = gone
    limit, peer, *_ = status(result([] if missing == "rates" else RATES, **modes))
    assert limit == ("met" if missing == "peer" else "missing")
    assert peer == ("missing" if missing == "peer" else "met")
    assert set(status(None)) == {"missing"}


def test_page_has_a_row_for_every_mode_and_says_what_the_disk_gave() -> None:
    modes = {"zx3": mode([1.0, 1.0]), "zx3_nvme": mode([1.1, 2.2], (GB, 0))}
    text = table.page([result(RATES, **modes)])
    rows = {n: next(r for r in text.splitlines() if f"(`{n}`) |" in r) for n in OFFLOADED}
    assert {row.count("|") for row in rows.values()} == {offload_result.HEADER[0].count("|")}
    assert all("missing: not in this run" in rows[n] for n in set(OFFLOADED) - {"zx3", "zx3-nvme"})
    assert "| 2000 | 0 | 3.000 | 9.00 | 10.00 | 9.50 |" in rows["zx3-nvme"]
    assert "mixed 3.00 (2.00..4.00)" in text
    assert "missing: no compiler" in table.page([result([], **modes)])


def test_modes_of_both_tables_are_the_same_ones() -> None:
    assert all(OFFLOADED[name] is MODES[name] for name in set(MODES) & set(OFFLOADED))


@pytest.fixture
def loop(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    try:
        with disk.measured(tmp_path, 1, MIB):
            pass
    except Unavailable as error:
        pytest.skip(f"no direct transfers by io_uring: {error}")


def moved(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def test_a_mixed_pass_reads_and_writes_every_byte(loop: None, tmp_path: Path) -> None:
    size = 9 * MIB + 4096  # the last block is a part of one
    with disk.measured(tmp_path, 2, size) as found:
        for team in found._teams:
            for one in team:
                for what, expected in (
                    ("read", (size, 0)),
                    ("write", (0, size)),
                    ("mixed", (size,) * 2),
                ):
                    before = moved(one.pid)
                    one.run(what)
                    delta = tuple(b - a for a, b in zip(before, moved(one.pid), strict=True))
                    assert delta == expected, what
        rates = found.rates()
    assert set(rates) == set(disk.KINDS) and min(rates.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_memory_is_whole_blocks_of_every_setting() -> None:
    assert all(disk.MEMORY % block == 0 and block * n <= disk.MEMORY for block, n in disk.SETTINGS)


def test_without_rates_the_modes_still_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(offload, "compare", lambda *_: iter([{"modes": {}}]))
    said: list[str] = []
    (found,) = offload.measure("gpt-tiny", ["zx3"], Settings(rounds=1), said.append, tmp_path)
    reason = "no C++ compiler: no-such-compiler"
    assert found["disk"]["rounds"] == [] and found["disk"]["reason"] == reason
    assert said == [f"disk: missing: {reason}"]
