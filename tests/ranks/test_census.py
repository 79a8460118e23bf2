"""The independent counters themselves: they must notice what they are there to notice."""

from __future__ import annotations

import torch
import torch.distributed as dist
from census import bytes_since, counted_calls, live_storages, wire_bytes
from formula import state_bytes, traffic_bytes
from torch import nn


def hoard() -> tuple[int, int, int]:
    before = live_storages()
    first = torch.ones(1000)
    views = [first[i:] for i in range(5)]
    second = nn.Linear(10, 10, bias=False)
    second.weight.grad = torch.ones(10, 10)
    both = bytes_since(before)
    del views, second
    one = bytes_since(before)
    first.untyped_storage().resize_(0)
    return both, one, bytes_since(before)


def exchange(numel: int) -> tuple[dict[str, int], int, int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    x, whole = torch.ones(numel), torch.ones(size * numel)
    dist.barrier()
    start = wire_bytes()
    with counted_calls() as traffic:
        dist.all_gather_into_tensor(whole, x)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        sent = dist.isend(x, (rank + 1) % size)
        dist.recv(torch.empty_like(x), (rank - 1) % size)
        sent.wait()
    used = wire_bytes() - start
    dist.all_gather_into_tensor(whole, x)
    dist.barrier()
    return dict(traffic.sent), traffic.control, used


def test_storages_are_counted_once_and_only_while_they_live(ranks):
    assert ranks(1)(hoard) == [(4000 + 400 + 400, 4000, 0)]


def test_calls_and_wire_agree_on_what_is_sent(ranks):
    for num_ranks in (2, 3):
        for sent, control, used in ranks(num_ranks)(exchange, 300_000):
            others = (num_ranks - 1) * 1_200_000
            gather = next(key for key in sent if key.startswith("all_gather"))
            assert sent == {gather: others, "all_to_all_single": others, "isend": 1_200_000}
            assert control == 0
            assert sum(sent.values()) <= used < 1.001 * sum(sent.values())


def test_formulas_give_the_published_factors():
    """ZeRO's table 1 per element with K = 12, and 2 and 3 model volumes (arXiv:1910.02054)."""
    model = nn.Linear(64, 64, bias=False)  # 4096 elements: no padding for up to 256 ranks
    sized = {"param_size": 2, "grad_size": 2, "optim_size": 12}
    for ranks, per_element in (
        (1, (16, 16, 16, 16)),
        (4, (16, 7, 5.5, 4)),
        (64, (16, 4.1875, 2.21875, 0.25)),
    ):
        found = [state_bytes(model, stage, ranks, **sized) for stage in range(4)]
        assert [f.total / 4096 for f in found] == list(per_element)
        assert [f.ideal / 4096 for f in found] == list(per_element)
    for stage, volumes in ((0, 2), (1, 2), (2, 2), (3, 3)):
        for ranks in (2, 4):
            sent = traffic_bytes(model, stage, ranks)
            assert sum(sent.values()) == volumes * 4096 * 4 * (ranks - 1) // ranks
