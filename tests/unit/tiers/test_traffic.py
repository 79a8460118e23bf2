"""What Traffic counts, over transfers whose times are made up."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.unit.tiers.conftest import Make
from zeroexp.errors import FileError
from zeroexp.tiers import Moved, Traffic, Transfer, traffic
from zeroexp.tiers.python_pool import PythonPool


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class MadeUp:
    """A Transfer that ends at ``at``; who waits for it earlier waits until then."""

    clock: Clock
    at: float
    error: FileError | None = None
    ended: float = field(default=0.0)

    @property
    def over(self) -> bool:
        return self.clock.now >= self.at

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.at)
        self.ended = self.at
        if self.error is not None:
            raise self.error

    def counted(self, counts: Traffic, num_bytes: int, write: bool) -> traffic.CountedTransfer:
        return counts.count(cast(Transfer, self), num_bytes, write=write)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(traffic, "time", made)
    return made


def test_a_step_by_hand(clock: Clock) -> None:
    counts = Traffic()
    assert counts.last_step == counts.total == Moved(0, 0, 0.0, 0.0)
    assert counts.total.bytes_per_second is None
    first = MadeUp(clock, 104.0).counted(counts, 1000, False)  # 100 to 104
    clock.now = 102.0
    second = MadeUp(clock, 110.0).counted(counts, 500, True)  # 102 to 110
    clock.now = 106.0
    first.wait()
    counts.mark_step()
    assert counts.last_step == Moved(1000, 500, 0.0, 4.0)
    second.wait()
    second.wait()
    clock.now = 120.0
    third = MadeUp(clock, 121.0).counted(counts, 30, True)
    third.wait()
    counts.mark_step()
    assert counts.last_step == Moved(0, 30, 5.0, 7.0)
    assert counts.total == Moved(1000, 530, 5.0, 11.0)
    assert counts.total.bytes_per_second == 1530 / 11


def test_busy_is_the_union_of_all_transfers(clock: Clock) -> None:
    """Ends in any order, waited for late: against counting every second by itself."""
    draw = random.Random(0)
    for _ in range(50):
        counts, seconds = Traffic(), set[int]()
        open_now: list[traffic.CountedTransfer] = []
        for _ in range(40):
            clock.now += draw.choice([0, 0, 1, 2, 30])
            if draw.random() < 0.6 or not open_now:
                length = draw.randrange(8)
                seconds |= set(range(int(clock.now), int(clock.now) + length))
                open_now.append(MadeUp(clock, clock.now + length).counted(counts, 1, False))
            else:
                open_now.pop(draw.randrange(len(open_now))).wait()
        for transfer in open_now:
            transfer.wait()
        assert counts.busy == len(seconds)
        assert counts._spans == [] and not counts._open


def test_what_a_failed_transfer_left_undone_is_not_counted(clock: Clock) -> None:
    counts = Traffic()
    failed = MadeUp(clock, 103.0, FileError(28, "full", "f", wanted=100, done=40))
    counted = failed.counted(counts, 100, True)
    for _ in range(2):
        with pytest.raises(FileError, match="full"):
            counted.wait()
    assert counts.total == Moved(0, 40, 3.0, 3.0)


def test_a_transfer_ends_when_it_ends_not_when_somebody_looks(make: Make, tmp_path: Path) -> None:
    """The engine's clock is time.monotonic: what is waited for in reverse still ended in order."""
    file = make().create(tmp_path / "f", 10_000)
    before = time.monotonic()
    first = file.submit_write(torch.zeros(10_000, dtype=torch.uint8))
    while not first.over:
        time.sleep(0.001)
    between = time.monotonic()
    second = file.submit_write(torch.zeros(0, dtype=torch.uint8))
    second.wait()
    assert first.ended == 0.0
    first.wait()
    assert before <= first.ended <= between <= second.ended <= time.monotonic()


def test_the_python_engine_notes_the_end_of_the_last_piece(tmp_path: Path) -> None:
    pool, go = PythonPool("test", block_size=4096, threads=1), threading.Event()
    number, _ = pool.open(str(tmp_path / "f"), "create", 10_000)
    pool._executor.submit(go.wait)
    data = torch.zeros(10_000, dtype=torch.uint8)
    ticket = pool.submit(
        file=number, write=True, address=data.data_ptr(), num_bytes=10_000, offset=0
    )
    held_until = time.monotonic()
    go.set()
    assert held_until <= pool.wait(ticket).ended <= time.monotonic()
    pool.shut_down()


def test_threads_count_together(make: Make, tmp_path: Path) -> None:
    """Each over a file of its own, with one Traffic: nothing is lost between them."""
    engine, counts = make(), Traffic()
    failed: list[BaseException] = []

    def transfers(number: int) -> None:
        try:
            file = engine.create(tmp_path / str(number), 8 * 100)
            data = torch.zeros(100, dtype=torch.uint8)
            for _ in range(40):
                submitted = [file.submit_write(data, 100 * i) for i in range(8)]
                for transfer in [counts.count(t, 100, write=True) for t in submitted]:
                    transfer.wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=transfers, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and counts.total.written == 3 * 40 * 8 * 100
    assert counts._spans == [] and not counts._open
