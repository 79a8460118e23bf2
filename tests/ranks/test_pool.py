"""The pool of ranks itself: order, fresh groups, failures, deadlines, recovery."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError


def who() -> tuple[int, int, int, str]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), str(dist.get_backend())


def total(value: float) -> float:
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return float(tensor)


def put(key: str) -> bool:
    """Whether the group's store has seen ``key`` before; the key is left there."""
    store = dist.distributed_c10d._get_default_store()
    seen = store.check([key])
    dist.barrier()
    store.set(key, "1")
    dist.barrier()
    return bool(seen)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words")
        os._exit(7)
    dist.barrier()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def raise_after(delays: list[float]) -> None:
    time.sleep(delays[dist.get_rank()])
    raise KeyError(dist.get_rank())


def speak(word: str) -> None:
    print(f"{word} {dist.get_rank()}")


def leave_settings_changed() -> None:
    os.environ["ZEROEXP_LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.destroy_process_group()


def settings() -> tuple[str | None, torch.dtype, bool, float]:
    value = float(torch.rand(()))
    left = os.environ.get("ZEROEXP_LEFT_BEHIND")
    return left, torch.get_default_dtype(), torch.is_grad_enabled(), value


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_separate_processes(ranks, num_ranks):
    found = ranks(num_ranks)(who)
    assert [each[:2] for each in found] == [(rank, num_ranks) for rank in range(num_ranks)]
    assert len({pid for _, _, pid, _ in found} | {os.getpid()}) == num_ranks + 1
    assert {backend for *_, backend in found} == {"gloo"}


def test_workers_live_on_and_collectives_work(ranks):
    before = [pid for _, _, pid, _ in ranks(2)(who)]
    assert ranks(2)(total, 3.0) == [9.0, 9.0]
    assert [pid for _, _, pid, _ in ranks(2)(who)] == before


def test_each_call_has_a_group_of_its_own(ranks):
    assert ranks(2)(put, "mark") == [False, False]
    assert ranks(2)(put, "mark") == [False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hanging_rank_fails_in_time_with_its_stack_and_the_pool_recovers(ranks, rank):
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2)(hang_on, rank, timeout=4)
    assert time.monotonic() - started < 60
    assert caught.value.rank == rank and caught.value.kind == "timeout"
    assert "hang_on" in str(caught.value)
    assert ranks(2)(total, 1.0) == [3.0, 3.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_is_named_and_replaced(ranks, rank):
    before = {pid for _, _, pid, _ in ranks(2)(who)}
    with pytest.raises(RankError) as caught:
        ranks(2)(exit_on, rank, timeout=30)
    died = [failure for failure in caught.value.failures if failure.kind == "died"]
    assert [failure.rank for failure in died] == [rank] and "code 7" in died[0].message
    assert "last words" in str(caught.value)
    after = ranks(2)(who)
    assert after[rank][2] not in before
    assert ranks(2)(total, 1.0) == [3.0, 3.0]


def test_an_exception_comes_back_with_rank_and_traceback(ranks):
    with pytest.raises(RankError, match="rank 1 failed first: ValueError: boom on 1") as caught:
        ranks(2)(raise_on, 1)
    assert isinstance(caught.value.error, ValueError)
    assert caught.value.__cause__ is caught.value.error
    assert "in raise_on" in caught.value.failures[0].trace


def test_the_first_failure_comes_first(ranks):
    with pytest.raises(RankError) as caught:
        ranks(3)(raise_after, [0.8, 0.4, 0.0])
    assert [failure.rank for failure in caught.value.failures] == [2, 1, 0]


def test_prints_are_captured_per_rank(ranks, capsys):
    run = ranks(2)
    run(speak, "hello")
    assert [text.strip() for text in run.output] == ["hello 0", "hello 1"]
    assert "[rank 1] hello 1" in capsys.readouterr().out


def test_settings_do_not_leak_into_the_next_call(ranks):
    (_, _, _, first), *_ = ranks(1)(settings)
    ranks(1)(leave_settings_changed)
    assert ranks(1)(settings) == [(None, torch.float32, True, first)]


def test_what_cannot_travel_is_said(ranks):
    with pytest.raises(TypeError, match="module-level"):
        ranks(1)(lambda: None)
    with pytest.raises(RankError, match=r"(?i)pickle"):
        ranks(1)(unpicklable)
