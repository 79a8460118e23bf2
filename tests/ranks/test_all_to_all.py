"""All-to-all with uneven parts: values, gradients, bytes, deadlines, and what runs beside it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from census import counted_calls
from moe_lab import expert_group
from pool import RankError
from torch import Tensor, nn

from zeroexp.comm.all_to_all import AllToAll
from zeroexp.comm.group import Group
from zeroexp.comm.native import NativeGroup
from zeroexp.errors import CollectiveTimeout
from zeroexp.ledger import Ledger
from zeroexp.moe import MLP, MoE, name_layers, read_statistics, update_biases

COUNTS = {
    2: [[3, 2], [0, 4]],
    4: [[1, 0, 2, 3], [0, 0, 0, 0], [5, 1, 0, 2], [0, 7, 0, 0]],
}


def native_group() -> Group:
    size = dist.get_world_size()
    channel = dist.new_group(timeout=timedelta(seconds=30))
    return NativeGroup(channel, range(size), dist.get_rank(), Ledger(), 30.0)


def exchanged(native: bool) -> dict[str, Any]:
    """Rows (source, target, number) sent by the table, and gradients of their own on the way
    back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    table = COUNTS[size]
    group = native_group() if native else expert_group(size)
    rows = [[rank, to, n] for to in range(size) for n in range(table[rank][to])]
    x = torch.tensor(rows, dtype=torch.float64).view(-1, 3).requires_grad_()
    transfer = AllToAll(
        group, received=[row[rank] for row in table], sent=table[rank], tag=3, what="rows"
    )
    with counted_calls() as traffic:
        arrived = transfer.end(transfer.start(x))
        (grad,) = torch.autograd.grad(arrived, x, arrived.detach() * 10)
    return {
        "arrived": arrived.tolist(),
        "grad": torch.equal(grad, 10 * x),
        "ledger": group.ledger.comm_bytes().get("all_to_all", 0),
        "counted": traffic.total + traffic.control,
    }


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_arrive_by_origin_and_gradients_go_home(ranks: Any, size: int, native: bool) -> None:
    table = COUNTS[size]
    for rank, found in enumerate(ranks(size)(exchanged, native)):
        wanted = [[s, rank, n] for s in range(size) for n in range(table[s][rank])]
        assert found["arrived"] == wanted
        assert found["grad"]
        others = [i for i in range(size) if i != rank]
        nbytes = 24 * sum(table[rank][i] + table[i][rank] for i in others)
        assert found["ledger"] == nbytes
        if not native:  # the wrapper has no formula for uneven splits of the backend's own call
            assert found["counted"] == nbytes


S, H, K = 32, 64, 2


def even_layer(size: int, k: int = K) -> tuple[MoE, Tensor]:
    """A dropless layer whose tokens go to all experts alike, and tokens for it."""
    torch.manual_seed(0)
    group = expert_group(size)
    layer = MoE(H, MLP(16), 8, k, gate="topk", balance_loss=0.0, group=group)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:, :8] = 9 * torch.eye(8) + 8 * torch.eye(8).roll(1, 1)
    x = torch.zeros(S, H)
    x[torch.arange(S), torch.arange(S) % 8] = 1
    return layer, x.requires_grad_()


def bytes_of_a_pass(size: int) -> dict[str, Any]:
    layer, x = even_layer(size)
    with counted_calls() as forward:
        y = layer(x)
    with counted_calls() as backward:
        y.sum().backward()
    assert layer.group is not None or size == 1
    ledger = {} if layer.group is None else layer.group.ledger.comm_bytes()
    numbers = read_statistics(layer)[""]
    return {
        "forward": (forward.total, sum(forward.calls.values())),
        "backward": (backward.total, sum(backward.calls.values())),
        "ledger": ledger,
        "statistics": numbers.all_to_all_bytes,
        "seconds": numbers.all_to_all_seconds,
        "drop_rate": numbers.drop_rate,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_are_those_of_the_formula(ranks: Any, size: int) -> None:
    """papers.md 1.7: dispatch = combine = S k h B (EP - 1) / EP per rank, twice forward and twice
    backward; deepspeed.md 3.F case 92: no call at ep 1, two at ep 2."""
    each = S * K * H * 4 * (size - 1) // size
    for found in ranks(size)(bytes_of_a_pass, size):
        messages = 2 * (size - 1)
        assert found["forward"] == (2 * each, messages)
        assert found["backward"] == (2 * each, messages)
        assert found["ledger"].get("all_to_all", 0) == 4 * each == found["statistics"]
        if size == 1:
            assert found["ledger"] == {}
        else:
            # The table of counts: 8 experts, 8 bytes, to each peer.
            assert found["ledger"]["control"] == 64 * (size - 1)
            assert found["seconds"] > 0


def full_capacity(size: int) -> int:
    """Bytes sent where every expert is full."""
    layer, x = even_layer(size)
    again = MoE(
        H, MLP(16), 8, K, gate="topk", capacity_factor=1.0, min_capacity=1, group=layer.group
    )
    again.load_state_dict(layer.state_dict())
    again(x)
    assert layer.group is not None
    return layer.group.ledger.comm_bytes()["all_to_all"]


def test_a_full_capacity_sends_what_padding_would(ranks: Any) -> None:
    """papers.md 1.7: E C h B (EP - 1) / EP each way, C = S k / E; fuller never, emptier less."""
    capacity = S * K // 8
    assert ranks(2)(full_capacity, 2) == [2 * 8 * capacity * H * 4 // 2] * 2


class Logged(nn.Module):
    """A shared expert that says when it runs, forward and backward."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("shared")
        y: Tensor = self.linear(x)
        y.register_hook(lambda grad: self.log.append("shared backward"))
        return y


def order_of_events() -> list[str]:
    log: list[str] = []
    layer, x = even_layer(2)
    layer.shared = Logged(log)
    group = layer.group
    assert group is not None
    start = group.all_to_all

    def started(*args: Any, **keys: Any) -> Any:
        log.append("start")
        return start(*args, **keys)

    group.all_to_all = started  # type: ignore[method-assign]
    layer.statistics.transferred = (  # type: ignore[method-assign]
        lambda nbytes, seconds: log.append("end")
    )
    y = layer(x)
    log.append("|")
    y.sum().backward()
    return log


def test_shared_experts_run_while_the_rows_travel(ranks: Any) -> None:
    forward = ["start", "shared", "end", "start", "end"]
    backward = ["start", "end", "start", "shared backward", "end"]
    assert ranks(2)(order_of_events) == [[*forward, "|", *backward]] * 2


def without_the_last_rank(what: str) -> str:
    """What the others say when one rank does not take part."""
    size = dist.get_world_size()
    group = expert_group(size, timeout=1.0)
    model = nn.ModuleDict({"mlp": MoE(H, MLP(16), 8, 2, group=group, balance_loss=0.0)})
    name_layers(model)
    said = ""
    if dist.get_rank() < size - 1:
        with pytest.raises(CollectiveTimeout) as caught:
            if what == "layer":
                model["mlp"](torch.randn(4, H))
            else:
                ones = [1] * size
                rows = torch.zeros(size, 3)
                transfer = AllToAll(group, received=ones, sent=ones, tag=0, what="rows")
                transfer.end(transfer.start(rows))
        said = str(caught.value)
    else:
        time.sleep(1.5)  # elsewhere, and alive
    dist.barrier()
    return said


@pytest.mark.parametrize("what", ["layer", "rows"])
def test_a_missing_rank_is_named(ranks: Any, what: str) -> None:
    said, nothing = ranks(2)(without_the_last_rank, what)
    start = "MoE layer mlp: tokens per expert" if what == "layer" else "rows"
    assert said.startswith(f"{start}: no answer from rank 1 within 1 s")
    assert nothing == ""


def balanced_together() -> dict[str, Any]:
    """Each rank's tokens all want the expert of the other; together they want both alike."""
    group = expert_group(2)
    layer = MoE(4, MLP(4), 2, gate="sigmoid", bias_rate=0.5, balance_loss=0.0, group=group)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    x = torch.ones(3, 4) * (-1 if dist.get_rank() == 0 else 1)
    layer(x)
    update_biases(layer, group)
    assert layer.gate.bias is not None
    numbers = read_statistics(layer, group)[""]
    return {"bias": layer.gate.bias.value.tolist(), "numbers": numbers}


def test_loads_are_summed_over_ranks(ranks: Any) -> None:
    found = ranks(2)(balanced_together)
    for result in found:
        assert result["bias"] == [0, 0]
        assert result["numbers"].tokens_per_expert == (3, 3)
        assert result["numbers"].max_vio == 0
        assert result["numbers"].all_to_all_bytes == 2 * 2 * (3 * 4 * 4)  # there and back
    assert found[0]["numbers"] == found[1]["numbers"]


def refused_on_one_rank() -> None:
    layer, x = even_layer(2)
    if dist.get_rank() == 1:
        x = x[:, :5]
    layer(x)


def test_the_first_error_is_that_of_the_rank_that_erred(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1 failed first: ModelError.*takes \[\.\.\., 64\]"):
        ranks(2)(refused_on_one_rank, timeout=20)
