"""Barriers, objects and numbers of the strategy, in their own group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.strategies.side_group import SideGroup


def reduced(op: Any, kind: str) -> Any:
    rank = dist.get_rank()
    given = {
        "float": torch.tensor([1.0 + rank, 5.0 - rank]),
        "int": torch.tensor([3 + 2 * rank, -4]),
        "bool": torch.tensor([rank == 0, False]),
    }[kind]
    before = given.clone()
    result = SideGroup(30).reduce(given, op=op)
    assert torch.equal(
        given, before
    )  # Lightning's own works in place; a logged metric should not change
    return result.tolist(), str(result.dtype)


@pytest.mark.parametrize(
    ("op", "kind", "expected"),
    [
        ("mean", "float", [2.0, 4.0]),
        ("avg", "float", [2.0, 4.0]),
        ("sum", "float", [6.0, 12.0]),
        (dist.ReduceOp.SUM, "float", [6.0, 12.0]),
        (None, "float", [6.0, 12.0]),
        ("max", "float", [3.0, 5.0]),
        ("min", "float", [1.0, 3.0]),
        ("mean", "int", [5, -4]),
        ("sum", "int", [15, -12]),
        ("max", "bool", [True, False]),
    ],
)
def test_reduce(ranks: Any, op: Any, kind: str, expected: list[Any]) -> None:
    dtype = {"float": "torch.float32", "int": "torch.int64", "bool": "torch.bool"}[kind]
    assert ranks(3)(reduced, op, kind) == [(expected, dtype)] * 3


def unknown_operation() -> None:
    SideGroup(30).reduce(torch.zeros(1), op="median")


def test_an_unknown_operation_names_the_known(ranks: Any) -> None:
    with pytest.raises(Exception, match="known are sum, mean"):
        ranks(2)(unknown_operation)


def gathered(sync_grads: bool) -> Any:
    rank = dist.get_rank()
    value = torch.tensor([float(rank), 2.0], requires_grad=True)
    result = SideGroup(30).all_gather(value, sync_grads=sync_grads)
    grad: Tensor | None = None
    if sync_grads:
        (result.sum() * (rank + 1)).backward()
        grad = value.grad
    return result.tolist(), None if grad is None else grad.tolist(), result.requires_grad


def test_all_gather_stacks_the_ranks(ranks: Any) -> None:
    for values, grad, tracked in ranks(2)(gathered, False):
        assert values == [[0.0, 2.0], [1.0, 2.0]]
        assert grad is None
        assert not tracked
    for _, grad, tracked in ranks(2)(gathered, True):
        assert grad == [3.0, 3.0]  # the sum over the ranks' gradients: 1 + 2
        assert tracked


def objects() -> Any:
    group, rank = SideGroup(30), dist.get_rank()
    first = group.broadcast({"rank": rank, "path": "a"})
    second = group.broadcast([rank], src=1)
    votes = [group.agree(rank == 0, every=every) for every in (True, False)]
    total = group.start_sum(rank + 1)
    group.barrier("somewhere")
    return first, second, votes, total.result()


def test_objects_votes_and_sums(ranks: Any) -> None:
    assert ranks(2)(objects) == [({"rank": 0, "path": "a"}, [1], [False, True], 3)] * 2


def late(rank: int) -> str:
    import time

    group = SideGroup(3)
    if dist.get_rank() == rank:
        time.sleep(8)
        return ""
    try:
        group.barrier("the save")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_a_barrier_names_who_is_missing(ranks: Any) -> None:
    said = ranks(3)(late, 2)
    assert said[0].startswith(
        "CollectiveTimeout: rank 0: barrier 'the save' met its deadline of 3 s"
    )
    assert "2" in said[0].partition("deadline of 3 s")[2]


def alone() -> Any:
    group = SideGroup(1)
    tensor = torch.tensor([1.0])
    return (
        group.reduce(tensor).tolist(),
        group.all_gather(tensor).tolist(),
        group.agree(False, True),
    )


def test_one_rank_is_the_identity(ranks: Any) -> None:
    assert ranks(1)(alone) == [([1.0], [1.0], False)]
